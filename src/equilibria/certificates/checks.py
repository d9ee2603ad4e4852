"""Quantities that vanish at an equilibrium. They prove nothing, but reveal mistakes."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.certificates.facts import CellFacts, ObjectiveFacts, per_sample
from equilibria.certificates.states import flat_rows
from equilibria.certificates.stem import ImagePath
from equilibria.context import Context, State
from equilibria.context.state import Layout, state_tensors
from equilibria.equilibrium import EquilibriumLayer
from equilibria.equilibrium.capabilities import EnergyForm
from equilibria.equilibrium.objective import distance_per_sample

PERTURBATION = 0.01
"""ε of Proposition 2's check, in the feature g(x)."""


def probe_noise(layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    """Return noise in the shapes of a state, to probe σ; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in layout
    )


def fenchel_gap(form: EnergyForm, preactivation: State) -> Tensor:
    """Compute 1ᵀ[S*(y) + S(a) − ay] per sample, y = σ(a)."""
    sigma = form.cell.activation
    pairs = zip(state_tensors(form.image), state_tensors(preactivation), strict=True)
    gaps = [
        (sigma.conjugate(y) + sigma.primitive(a) - a * y).flatten(1).sum(dim=1) for y, a in pairs
    ]
    return torch.stack(gaps).sum(dim=0)


def firmness(form: EnergyForm, preactivation: State, noise: tuple[Tensor, ...]) -> Tensor:
    """Compute by how much σ fails to be firmly nonexpansive, as a proximal operator is."""
    sigma = form.cell.activation
    excess = []
    for a, step in zip(state_tensors(preactivation), noise, strict=True):
        moved = sigma(a + step) - sigma(a)
        excess.append((moved.square() - moved * step).flatten(1).sum(dim=1))
    return torch.stack(excess).sum(dim=0).clamp_min(0)


def proposition_two(
    layer: EquilibriumLayer,
    facts: CellFacts,
    objective: ObjectiveFacts,
    path: ImagePath,
    feature: Tensor,
    image: State,
) -> Tensor:
    """Evaluate MOptEqs' Proposition 2 at δ = ε sign(Uᵀy*), as left side ÷ right side.

    max{G(y′*; g − δ) − G(y*; g), √Nε‖U‖‖y′* − y*‖} ≥ ½(ε‖Uᵀy*‖₁ − Nε²), N the numbers of g, in the
    variables y = W^{−T}z and without its ‖U‖ ≤ 1.

    Args:
        layer: Equilibrium layer in float64.
        facts: Facts of its cell.
        objective: Facts of its hidden objective.
        path: Maps rows back to the feature.
        feature: Input g of the layer.
        image: State of the hidden objective.

    Returns:
        The quotient per sample, at least 1; ∞ if the right side is not positive.
    """
    pulled = path.pull_back_to_feature(flat_rows(image)).view(feature.shape)
    ends: list[tuple[State, Tensor, Context]] = []
    for g in (feature, feature - PERTURBATION * pulled.sign()):
        solution = layer.solve(g, solver="picard")
        end = facts.form(solution.state, facts.cell.inject(g))
        assert end is not None
        ends.append((end.image, end.cell.objective(end.context).value(end.image), end.context))
    (y, value, context), (moved, moved_value, _) = ends
    numbers = feature[0].numel()
    distance = per_sample(objective.input_lipschitz(context), feature)
    distance = distance * distance_per_sample(y, moved)
    left = torch.maximum(moved_value - value, numbers**0.5 * PERTURBATION * distance)
    sizes = pulled.flatten(1).abs().sum(dim=1)
    right = 0.5 * (PERTURBATION * sizes - numbers * PERTURBATION**2)
    return torch.where(right > 0, left / right, torch.inf)
