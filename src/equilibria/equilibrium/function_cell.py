"""Any map z = f(z, x) as a cell, and its fixed point in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Context
from equilibria.equilibrium.cell import Cell


class FunctionCell(Cell):
    """z = f(z, x), f a module or a function that takes the state and then the inputs.

    Nothing is known of f: no symmetry, no objective, no contraction. Gradients reach the inputs and
    the parameters of a module, or of the module whose method f is. A function that uses any other
    tensor which needs a gradient is refused, since that gradient would be lost.

    state_shape: the shape of the state of one sample; that of the first input if it is not given.

    Examples:
        >>> cell = eq.equilibrium.FunctionCell(lambda z, x: z / 2 + x)
        >>> cell.step(torch.zeros(1, 2), cell.inject(torch.ones(1, 2)))
        tensor([[1., 1.]])
    """

    def __init__(
        self, function: Callable[..., Tensor], state_shape: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"f must be a function of (z, x), not {type(function).__name__}")
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        # A method is looked up anew at each call: copies of the cell have modules of their own.
        self.method = "" if owner is function else getattr(function, "__name__", "")
        self.module = owner if isinstance(owner, nn.Module) else None
        self.function = None if self.module is not None else function
        self.state_shape = None if state_shape is None else tuple(state_shape)
        self._tried = False

    def inject(self, *inputs: Tensor) -> Context:
        context = Context(sample={"x": inputs if len(inputs) > 1 else inputs[0]})
        if not self._tried:
            self._try(*inputs)
            self._tried = True
        return context

    def initial_state(self, *inputs_and_context: Any) -> Tensor:
        x: Tensor = inputs_and_context[0]
        return torch.zeros_like(x if self.state_shape is None else x.new_empty(self._shape(x)))

    def step(self, state: Any, context: Context) -> Tensor:
        return self._call(state, *context.several("x"))

    def extra_repr(self) -> str:
        return "" if self.function is None else getattr(self.function, "__name__", "f")

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape) if self.state_shape is None else (len(x), *self.state_shape)

    def _call(self, *arguments: Tensor) -> Tensor:
        if self.function is not None:
            return self.function(*arguments)
        result: Tensor = getattr(self.module, self.method or "__call__")(*arguments)
        return result

    def _try(self, *inputs: Tensor) -> None:
        """One evaluation, so that what cannot work is said before a solve begins."""
        remedy = (
            "give the shape of the state of one sample: "
            "eq.EquilibriumLayer(eq.equilibrium.FunctionCell(f, state_shape=(...)))"
        )
        with torch.enable_grad():
            try:
                image = self._call(self.initial_state(*inputs), *(x.detach() for x in inputs))
            except TypeError as error:
                raise TypeError(f"f takes the state, and then the inputs: {error}") from error
            except RuntimeError as error:
                if self.state_shape is not None:
                    raise
                raise ValueError(f"f fails at a state of the input's shape: {remedy}") from error
        if not isinstance(image, Tensor) or image.shape != self._shape(inputs[0]):
            found = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"f maps a state of shape {self._shape(inputs[0])} to {found}: return a tensor of "
                f"the state's shape, or {remedy}"
            )
        own = {id(parameter) for parameter in self.parameters()}
        if any(id(leaf) not in own for leaf in _leaves(image)):
            raise ValueError(
                "f uses a tensor that needs a gradient and is neither an input nor a parameter of "
                "its module, so that the gradient would be lost: make f a torch.nn.Module with it "
                "as a parameter, or pass it as an input"
            )


def _leaves(tensor: Tensor) -> list[Tensor]:
    """The tensors that a result depends on and that gather gradients."""
    found, seen, nodes = [], set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes.extend(function for function, _ in node.next_functions)
    return found


def fixed_point(
    function: Callable[..., Tensor],
    inputs: Tensor | tuple[Tensor, ...],
    *,
    start: Tensor | None = None,
    **solving: Any,
) -> Tensor:
    """z* = f(z*, x), differentiable in x and in the parameters of f, if it is a module.

    start: where to begin, which also gives the state's shape; zeros of the input's shape if not.
    solving: solver, gradient, tolerance, max_iterations, strict, as of `EquilibriumLayer`, which is
        what a network is made of. A solve that does not converge warns.

    Examples:
        >>> x = torch.zeros(1, 1, requires_grad=True)
        >>> z = eq.fixed_point(lambda z, x: torch.cos(z) + x, x, tolerance=1e-6)
        >>> round(z.item(), 4), round(torch.autograd.grad(z.sum(), x)[0].item(), 4)  # 1/(1 + sin z)
        (0.7391, 0.5975)
    """
    from equilibria.equilibrium.layer import EquilibriumLayer

    cell = FunctionCell(function, None if start is None else start.shape[1:])
    layer = EquilibriumLayer(cell=cell, **solving)
    # Not in training, where running out of iterations is ordinary: here it is always told.
    layer.training = False
    return layer(inputs, start=start)  # type: ignore[no-any-return]
