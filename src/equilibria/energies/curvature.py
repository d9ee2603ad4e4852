"""Estimate of the largest curvature of an energy term at a state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import state_tensors, unflatten_state
from equilibria.energies.base import Energy
from equilibria.energies.local_gradients import gradients_of


@torch.no_grad()
def curvature(term: Energy, state: State, context: Context, steps: int = 12) -> float:
    """Estimate the eigenvalue of ∇²E of largest magnitude, over all samples of a batch.

    Power iteration converges to it from below in magnitude.

    Args:
        term: The energy term.
        state: The state y at which ∇²E is evaluated.
        context: Tensors that the term reads besides the state; they depend on the input x.
        steps: Number of power iterations.

    Returns:
        The signed eigenvalue, or 0 if no finite nonzero estimate exists.

    Examples:
        >>> term, y = eq.Quadratic(0.5 * torch.eye(2)), torch.ones(1, 2)
        >>> context = eq.EnergyCell(term).inject(y)
        >>> round(eq.energies.curvature(term, y, context), 3)
        -0.25
    """
    generator = torch.Generator().manual_seed(0)
    tensors = state_tensors(state)
    vectors = [torch.randn(t.shape, generator=generator).to(t) for t in tensors]
    eigenvalue = 0.0
    for _ in range(steps):
        # The Hessian times v is the gradient of ⟨v, ∇E⟩.
        def along(states: tuple[Tensor, ...], context: Context, v: Any = vectors) -> Tensor:
            descent = state_tensors(term.descent(unflatten_state(state, states), context))
            return -torch.stack([(a * b).sum() for a, b in zip(v, descent, strict=True)]).sum()

        products = gradients_of(along, tensors, context)
        norm = float(torch.stack([p.square().sum() for p in products]).sum().sqrt())
        if not 0 < norm < math.inf:
            return 0.0
        agreement = [(v * p).sum() for v, p in zip(vectors, products, strict=True)]
        eigenvalue = math.copysign(norm, float(torch.stack(agreement).sum()))
        vectors = [p / norm for p in products]
    return eigenvalue
