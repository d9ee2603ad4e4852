"""Cells defined by a function z = f(z, x), and their fixed point in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Context
from equilibria.equilibrium.cell import Cell

MAX_CHECKED_SHAPES = 1000
"""Largest number of shapes of inputs that a cell remembers as checked."""


class FunctionCell(Cell):
    """Cell z = f(z, x) defined by a module, a method of a module, or a function.

    No symmetry, objective or contraction of f is known. Gradients reach the inputs and the
    parameters of the module.

    Args:
        function: f, called with the state and the inputs; returns a tensor of the state's shape.
        state_shape: Shape of the state of one sample; by default that of the first input. None in
            it stands for the size of the first input in the same dimension: (32, None, None) has
            32 channels and the height and width of the images.

    Raises:
        TypeError: If `function` is not callable or does not take these arguments.
        ValueError: On the first solve with inputs of a shape, if f does not return a tensor of the
            state's shape, or uses another tensor that requires a gradient, which would be lost.

    Examples:
        >>> cell = eq.equilibrium.FunctionCell(lambda z, x: z / 2 + x)
        >>> cell.step(torch.zeros(1, 2), cell.inject(torch.ones(1, 2)))
        tensor([[1., 1.]])
    """

    def __init__(
        self, function: Callable[..., Tensor], state_shape: Sequence[int | None] | None = None
    ) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"f must be a function of (z, x), got {type(function).__name__}")
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        # Methods are stored by name, because a copy of the cell has a copy of the module.
        self.method = "" if owner is function else getattr(function, "__name__", "")
        self.module = owner if isinstance(owner, nn.Module) else None
        self.function = None if self.module is not None else function
        self.state_shape = None if state_shape is None else tuple(state_shape)
        self._checked: set[tuple[torch.Size, ...]] = set()

    remedy = (
        "damp the iteration (solver={'name': 'picard', 'damping': 0.5}) or make f a contraction in "
        "the state"
    )

    def inject(self, *inputs: Tensor) -> Context:
        context = Context(sample={"x": inputs if len(inputs) > 1 else inputs[0]})
        shapes = tuple(x.shape[1:] for x in inputs)
        if shapes not in self._checked:
            self._check(*inputs)
            if len(self._checked) < MAX_CHECKED_SHAPES:
                self._checked.add(shapes)
        return context

    def initial_state(self, *inputs_and_context: Any) -> Tensor:
        x: Tensor = inputs_and_context[0]
        return torch.zeros_like(x if self.state_shape is None else x.new_empty(self._shape(x)))

    def step(self, state: Any, context: Context) -> Tensor:
        return self._call(state, *context.several("x"))

    def extra_repr(self) -> str:
        return "" if self.function is None else getattr(self.function, "__name__", "f")

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        own = tuple(x.shape[1:])
        if self.state_shape is None:
            return (len(x), *own)
        if None in self.state_shape and len(self.state_shape) != len(own):
            raise ValueError(
                f"state_shape={self.state_shape} follows the input, so it must have as many "
                f"entries as the shape of an input without the batch, {own}; replace None by "
                "numbers"
            )
        sizes = itertools.zip_longest(self.state_shape, own[: len(self.state_shape)])
        return (len(x), *(size if given is None else given for given, size in sizes))

    def _call(self, *arguments: Tensor) -> Tensor:
        if self.function is not None:
            return self.function(*arguments)
        result: Tensor = getattr(self.module, self.method or "__call__")(*arguments)
        return result

    def _check(self, *inputs: Tensor) -> None:
        """Evaluate f once, to raise errors before a solve begins."""
        shape = self._shape(inputs[0])
        remedy = (
            "pass the shape of the state of one sample: "
            "eq.EquilibriumLayer(eq.equilibrium.FunctionCell(f, state_shape=(...)))"
        )
        described = f"the input's shape {shape}"
        if self.state_shape is not None:
            described = f"shape {shape}, for an input of shape {tuple(inputs[0].shape)}"
            remedy = (
                f"state_shape={self.state_shape} fixes this shape; None in it follows the input, "
                "for example (32, None, None) for images of any size"
            )
        with torch.enable_grad():
            try:
                image = self._call(self.initial_state(*inputs), *(x.detach() for x in inputs))
            except TypeError as error:
                raise TypeError(f"f must take the state and the inputs: {error}") from error
            except RuntimeError as error:
                raise ValueError(
                    f"f failed at a state of {described}: {error}; {remedy}"
                ) from error
        if not isinstance(image, Tensor) or image.shape != shape:
            result = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"f maps a state of shape {shape} to {result}; return a tensor of the state's "
                f"shape, or {remedy}"
            )
        parameters = {id(parameter) for parameter in self.parameters()}
        if any(id(leaf) not in parameters for leaf in _leaves(image)):
            raise ValueError(
                "f uses a tensor that requires a gradient but is neither an input nor a parameter "
                "of its module, so its gradient would be lost; make f a torch.nn.Module with this "
                "tensor as a parameter, or pass it as an input"
            )


def _leaves(tensor: Tensor) -> list[Tensor]:
    """Return the leaves of the graph of a tensor that require a gradient."""
    leaves, visited, nodes = [], set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes.extend(function for function, _ in node.next_functions)
    return leaves


def fixed_point(
    function: Callable[..., Tensor],
    inputs: Tensor | tuple[Tensor, ...],
    *,
    start: Tensor | None = None,
    **solving: Any,
) -> Tensor:
    """Return the fixed point z* = f(z*, x), differentiable in x and the parameters of f.

    Use `EquilibriumLayer` for layers of a network.

    Args:
        function: f, a function or module that takes the state and the inputs.
        inputs: Input x, or a tuple of inputs.
        start: State to start from, which also defines the shape of the state; by default zeros of
            the shape of the (first) input.
        **solving: Options of `EquilibriumLayer`: solver, gradient, tolerance, max_iterations,
            strict.

    Returns:
        The fixed point, shape (B, ...).

    Warns:
        ConvergenceWarning: If the solve does not converge.

    Examples:
        >>> x = torch.zeros(1, 1, requires_grad=True)
        >>> z = eq.fixed_point(lambda z, x: torch.cos(z) + x, x, tolerance=1e-6)
        >>> round(z.item(), 4), round(torch.autograd.grad(z.sum(), x)[0].item(), 4)  # 1/(1 + sin z)
        (0.7391, 0.5975)
    """
    from equilibria.equilibrium.layer import EquilibriumLayer

    cell = FunctionCell(function, None if start is None else start.shape[1:])
    layer = EquilibriumLayer(cell=cell, **solving)
    # In training mode, layers do not report solves that run out of iterations.
    layer.training = False
    return layer(inputs, start=start)  # type: ignore[no-any-return]
