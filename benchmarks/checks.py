"""Checks of a contestant's result that use neither library.

They evaluate the map, or products with its Jacobian by autograd, at the returned state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import equilibria as eq

REFERENCE_TOLERANCE = 1e-9
REFERENCE_STEPS = 20_000

Loss = Callable[[Tensor], Tensor]


@torch.no_grad()
def relative_residual(cell: eq.Cell, x: Tensor, state: Tensor) -> float:
    """Return the largest ‖T(y) − y‖/‖T(y)‖ per sample, in float64; NaN counts as infinity."""
    exact = copy.deepcopy(cell).double()
    point = state.detach().double()
    image = exact.step(point, exact.inject(x.detach().double()))
    assert isinstance(image, Tensor)
    return _worst((image - point).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1))


def adjoint_residual(
    cell: eq.Cell, x: Tensor, state: Tensor, adjoint: Tensor, gradient: Tensor
) -> float:
    """Return the largest ‖g − (I − Jᵀ)u‖/‖g‖ per sample, with J the Jacobian of T at `state`.

    Uses the precision and memory format of `x` and `state`, so that every ReLU is on the same side
    of its kink as in the differentiated step.
    """
    point = state.detach().requires_grad_()
    image = cell.step(point, cell.inject(x.detach()))
    assert isinstance(image, Tensor)
    (product,) = torch.autograd.grad(image, point, adjoint)
    g, u, v = (t.detach().double().flatten(1) for t in (gradient, adjoint, product))
    return _worst((g - u + v).norm(dim=1) / g.norm(dim=1))


def pulled_back(cell: eq.Cell, x: Tensor, state: Tensor, adjoint: Tensor) -> list[Tensor]:
    """Return (∂T/∂θ)ᵀu for θ = x and the parameters: the gradient for an adjoint u."""
    leaf = x.detach().clone().requires_grad_()
    image = cell.step(state.detach(), cell.inject(leaf))
    assert isinstance(image, Tensor)
    return list(torch.autograd.grad(image, [leaf, *cell.parameters()], adjoint))


def reference_gradients(cell: eq.Cell, x: Tensor, loss: Loss) -> list[Tensor]:
    """Return the float64 gradient of loss(y*) in x and the parameters by unrolling.

    The plain iteration runs to convergence. Back-propagation through its last steps is then
    u ← Jᵀu + g at y*, which also runs to convergence and needs no memory for the steps.
    """
    exact = copy.deepcopy(cell).double()
    leaf = x.detach().double().requires_grad_()
    with torch.no_grad():
        context = exact.inject(leaf)
        state = _iterated(
            lambda y: _tensor(exact.step(y, context)), exact.initial_state(x, context)
        )
    point = state.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(point), point)
    image = _tensor(exact.step(point, exact.inject(leaf)))

    def pull(u: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(image, point, u, retain_graph=True)
        return product + gradient

    adjoint = _iterated(pull, gradient)
    return list(torch.autograd.grad(image, [leaf, *exact.parameters()], adjoint))


def gradient_error(computed: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Return the largest relative error ‖computed − reference‖/‖reference‖ per tensor."""
    errors = [
        (c.detach().double() - r.double()).norm() / r.double().norm()
        for c, r in zip(computed, reference, strict=True)
    ]
    return _worst(torch.stack(errors))


def _iterated(function: Callable[[Tensor], Tensor], start: eq.State) -> Tensor:
    point = _tensor(start).double()
    for _ in range(REFERENCE_STEPS):
        image = function(point)
        if bool((image - point).norm() <= REFERENCE_TOLERANCE * image.norm()):
            return image
        point = image
    raise RuntimeError("the reference iteration did not converge, so the map is not a contraction")


def _tensor(state: eq.State) -> Tensor:
    assert isinstance(state, Tensor)
    return state


def _worst(values: Tensor) -> float:
    return float(torch.nan_to_num(values, nan=torch.inf).max())
