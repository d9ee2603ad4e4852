"""One step of the map at the equilibrium, with products with its Jacobian."""

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
    """Data to rebuild one step of the map from saved tensors in a backward pass.

    The saved tensors are, in this order, those of the equilibrium, those of the context (what a
    step reads besides the state, computed once per solve), and the parameters.
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
        """Return for each saved tensor whether its first dimension is the batch."""
        states, parameters = [True] * self.state_count, [False] * len(self.parameter_names)
        return [*states, *self.context.is_per_sample(), *parameters]

    def linearize(self, tensors: Sequence[Tensor]) -> Linearization:
        """Evaluate one step of the fixed-point map from saved tensors, for the backward pass.

        Args:
            tensors: The saved tensors: equilibrium y, tensors of the context, parameters θ.

        Returns:
            T(y; θ). For energies also the activation's slope σ′ there, by which the symmetric
            backward solve is weighted.
        """
        count = self.state_count + len(self.context.tensors())
        context = self.context.replace(tensors[self.state_count : count])
        parameters = dict(zip(self.parameter_names, tensors[count:], strict=True))
        arguments = (self.state(tensors), context)
        result: Linearization
        with self.autocast():
            if has_replaced_methods(self.cell):
                return functional_call(self.cell, parameters, arguments)  # type: ignore[no-any-return]
            saved = {id(p): parameters[name] for name, p in self.cell.named_parameters()}
            result = twin(self.cell, lambda held: saved.get(id(held), held))(*arguments)
        return result


def has_replaced_methods(cell: nn.Module) -> bool:
    """Return whether a method was replaced by a function, which may refer to the original module.

    Such a module cannot be replaced by its twin.
    """
    return any(
        isinstance(value, FunctionType) and hasattr(type(module), name)
        for module in cell.modules()
        for name, value in vars(module).items()
    )


class LocalStep:
    """One step T(y; θ) of the fixed-point map, with derivatives in the state y and in θ.

    θ are the parameters of the cell and the tensors of its context (computed once per solve from
    the input and the parameters, and read by every step). Autograd treats y and each tensor of θ as
    independent inputs of the step, although the context was computed from parameters. The rest of
    the model's graph continues the derivatives from there.

    Args:
        recipe: How to evaluate the step.
        tensors: Saved tensors: equilibrium y, tensors of the context, parameters.
        create_graph: Whether the derivatives can be differentiated again. If not, the step is
            evaluated on the saved tensors without their graph; if so, on views that stay connected
            to the graph of the model.
        through_argument: If T = σ(d(y; θ)) with a known d, as for energies, differentiate d instead
            of T. The Jacobian is then the symmetric one of d, and the cotangent is multiplied by
            σ′(d).
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
            step = Linearization(*recipe.linearize(self.inputs))
        weighted = recipe.symmetry is Symmetry.WEIGHTED and step.weight is not None
        self.at_argument = weighted and through_argument and step.argument is not None
        output = step.argument if self.at_argument else step.image
        assert output is not None
        self.outputs = state_tensors(output)
        self.states = self.inputs[: recipe.state_count]
        self.weight: Tensor | None = None
        """S of the inner product in which I − Jᵀ is self-adjoint; None for the identity."""
        if weighted and step.weight is not None:
            self.weight = recipe.packing.pack(step.weight).detach()

    def transposed_product(self, flat: Tensor) -> Tensor:
        """Return Jᵀv, J the Jacobian of the step at the equilibrium, for a packed vector v.

        The result is packed in the same way.
        """
        gradients = torch.autograd.grad(
            self.outputs,
            self.states,
            self._unpack(flat, self.outputs),
            retain_graph=True,
            materialize_grads=True,
        )
        return self._pack(gradients)

    def product(self, flat: Tensor) -> Tensor:
        """Return the Jacobian-vector product Jv, J the Jacobian of the step at the equilibrium.

        It is computed by reverse mode only, as the derivative of the linear map u ↦ Jᵀu.

        Args:
            flat: The vector v, a state packed into one buffer, shape (problems, size).

        Returns:
            Jv, packed in the same way.
        """
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
        self, cotangents: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the products (∂T/∂θ)ᵀu for the inputs θ of the step T with `needed[i]`.

        The others are None.
        """
        chosen = [i for i, is_needed in enumerate(needed) if is_needed]
        if not chosen:
            return [None] * len(needed)
        gradients = torch.autograd.grad(
            self.outputs,
            [self.inputs[i] for i in chosen],
            [c.to(o.dtype) for c, o in zip(cotangents, self.outputs, strict=True)],
            create_graph=self.create_graph,
            allow_unused=True,
        )
        result: list[Tensor | None] = [None] * len(needed)
        for i, gradient in zip(chosen, gradients, strict=True):
            result[i] = gradient
        return result

    def _unpack(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        pieces = state_tensors(self.recipe.packing.unpack(flat))
        return [piece.to(tensor.dtype) for piece, tensor in zip(pieces, like, strict=True)]

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.recipe.packing.pack(unflatten_state(self.recipe.state(tensors), tensors))


def _cut(tensor: Tensor, create_graph: bool) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    if create_graph and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()
