"""One step of the map at the equilibrium, with its Jacobian as products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from equilibria.context import Context, State
from equilibria.context.state import Packing, state_tensors, unflatten_state
from equilibria.context.twin import twin
from equilibria.gradients.base import Linearization, Symmetry


@dataclass(frozen=True)
class StepRecipe:
    """All that is needed to rebuild one step of the map from saved tensors in a backward pass.

    The saved tensors are the equilibrium's, the context's and the cell's parameters, in this order.
    """

    cell: nn.Module
    context: Context
    packing: Packing
    parameter_names: tuple[str, ...]
    symmetry: Symmetry
    separable: bool
    """Whether the samples of a batch can be differentiated in blocks."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Enters the autocast state of the forward pass."""

    @property
    def state_count(self) -> int:
        return len(self.packing.layout)

    def state(self, tensors: Sequence[Tensor]) -> State:
        states = tuple(tensors[: self.state_count])
        return states[0] if self.packing.single else states

    def is_per_sample(self) -> list[bool]:
        """For each saved tensor whether it has a row a sample."""
        states, parameters = [True] * self.state_count, [False] * len(self.parameter_names)
        return [*states, *self.context.is_per_sample(), *parameters]

    def linearize(self, tensors: Sequence[Tensor]) -> Linearization:
        """T(y; θ) and S, the saved tensors in the places of the cell's own."""
        count = self.state_count + len(self.context.tensors())
        context = self.context.replace(tensors[self.state_count : count])
        parameters = dict(zip(self.parameter_names, tensors[count:], strict=True))
        arguments = (self.state(tensors), context)
        result: Linearization
        with self.autocast():
            if _has_replaced_methods(self.cell):
                return functional_call(self.cell, parameters, arguments)  # type: ignore[no-any-return]
            saved = {id(p): parameters[name] for name, p in self.cell.named_parameters()}
            result = twin(self.cell, lambda held: saved.get(id(held), held))(*arguments)
        return result


def _has_replaced_methods(cell: nn.Module) -> bool:
    """Whether a method was replaced by a function, which may hold the original and not its twin."""
    return any(
        isinstance(value, FunctionType) and hasattr(type(module), name)
        for module in cell.modules()
        for name, value in vars(module).items()
    )


class LocalStep:
    """T(y; θ) evaluated on a graph that is cut at y and θ.

    The cut matters: the context depends on parameters that the step may also use directly, and a
    derivative "with respect to θ" must not run on through the context into them. With
    `create_graph` the cut points are new nodes (`view_as`) that stay attached to what is behind
    them, so that the result can be differentiated again; otherwise they are detached leaves.

    through_argument: where T = σ(d(y; θ)) is known to be made so, and for energies it is, take d in
        the place of T: J is then its symmetric Jacobian H, and what is pulled back is Su.
    """

    def __init__(
        self,
        recipe: StepRecipe,
        tensors: Sequence[Tensor],
        *,
        create_graph: bool,
        through_argument: bool = False,
    ) -> None:
        self.recipe = recipe
        self.create_graph = create_graph
        with torch.enable_grad():
            self.inputs = [_cut(tensor, create_graph) for tensor in tensors]
            found = Linearization(*recipe.linearize(self.inputs))
        weighted = recipe.symmetry is Symmetry.WEIGHTED and found.weight is not None
        self.at_argument = weighted and through_argument and found.argument is not None
        output = found.argument if self.at_argument else found.image
        assert output is not None
        self.outputs = state_tensors(output)
        self.states = self.inputs[: recipe.state_count]
        self.weight: Tensor | None = None
        """S of the inner product in which I − Jᵀ is self-adjoint; None if it is plain."""
        if weighted and found.weight is not None:
            self.weight = recipe.packing.pack(found.weight).detach()

    def transposed_product(self, flat: Tensor) -> Tensor:
        """Jᵀv, packed."""
        gradients = torch.autograd.grad(
            self.outputs,
            self.states,
            self._unpack(flat, self.outputs),
            retain_graph=True,
            materialize_grads=True,
        )
        return self._pack(gradients)

    def product(self, flat: Tensor) -> Tensor:
        """Jv, packed, as the derivative of the linear map u ↦ Jᵀu."""
        with torch.enable_grad():
            probe = [torch.zeros_like(output, requires_grad=True) for output in self.outputs]
            images = torch.autograd.grad(
                self.outputs, self.states, probe, create_graph=True, materialize_grads=True
            )
        if not any(image.requires_grad for image in images):
            return torch.zeros_like(flat)
        gradients = torch.autograd.grad(
            images,
            probe,
            self._unpack(flat, self.states),
            materialize_grads=True,
            allow_unused=True,
        )
        return self._pack(gradients)

    def pull_back(
        self, cotangents: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """(∂T/∂θ)ᵀu for the inputs that are wanted, None for the others."""
        chosen = [i for i, want in enumerate(wanted) if want]
        if not chosen:
            return [None] * len(wanted)
        gradients = torch.autograd.grad(
            self.outputs,
            [self.inputs[i] for i in chosen],
            [c.to(o.dtype) for c, o in zip(cotangents, self.outputs, strict=True)],
            create_graph=self.create_graph,
            allow_unused=True,
        )
        result: list[Tensor | None] = [None] * len(wanted)
        for i, gradient in zip(chosen, gradients, strict=True):
            result[i] = gradient
        return result

    def _unpack(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        pieces = state_tensors(self.recipe.packing.unpack(flat))
        return [piece.to(one.dtype) for piece, one in zip(pieces, like, strict=True)]

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.recipe.packing.pack(unflatten_state(self.recipe.state(tensors), tensors))


def _cut(tensor: Tensor, create_graph: bool) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    if create_graph and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()
