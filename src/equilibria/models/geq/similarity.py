"""How alike GEQ's outputs are: Proposition 4 and Remark 3.

As printed the proposition lacks the number of units, its D has to be e^{2γB²‖W‖²}, and its proof
takes ⟨WᵀWz₁, z₂⟩ for at most μ²⟨z₁, z₂⟩, which vectors need not obey. Remark 3 compares κ̄ of GEQ
with itself, and lacks 1/√γ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.energies.gaussian import grid_dimensions
from equilibria.models.geq.bounds import BranchFacts, quotient
from equilibria.models.geq.linear_maps import adjoint, frobenius, least_singular


@dataclass(frozen=True)
class SimilarityBounds:
    """⟨z(x₁), z(x₂)⟩ of every pair of inputs and bounds of it, shape (inputs, inputs)."""

    measured: Tensor
    bound: Tensor
    """‖σ(Wᵀ diag(β)(Ux₁ + b))‖ · ‖σ(Wᵀ diag(β)(Ux₂ + b))‖, for any patches."""
    decaying: Tensor | None
    """D e^{−¼γσ_min(U)²‖x₁ − x₂‖²}‖W‖²‖Ux₁ + b‖‖Ux₂ + b‖; None with several patches."""
    printed: Tensor
    """Eq. 14, with its own D; an expectation over random U, not of this one."""
    printed_opteq: Tensor
    """Eq. 15."""
    remark_3: float
    """The distance of inputs beyond which D e^{…} ≤ 1: 2√(log D/γ)/σ_min(U)."""


def similarity_bounds(facts: BranchFacts) -> SimilarityBounds:
    """Proposition 4 of a branch, for the pairs of its inputs.

    Since z = σ(v) has ‖z‖² = ⟨z, v⟩, v = Wᵀ diag(β)(c − Wz), and −⟨Wz, diag(β)Wz⟩ ≤ 0, every
    equilibrium has ‖z‖ ≤ ‖σ(Wᵀ diag(β)c)‖ ≤ β_max‖W‖‖c‖, c = Ux + b.
    """
    z, c, x = (part.flatten(1) for part in (facts.states, facts.injected, facts.inputs))
    weights = _weights_of_numbers(facts)
    pulled = adjoint(facts.apply_W, facts.states, weights * c).flatten(1).relu().norm(dim=1)
    smallest = least_singular(facts.apply_U, tuple(facts.inputs.shape[1:]))
    variance = frobenius(facts.apply_U, tuple(facts.inputs.shape[1:])) / (c.shape[1] * x.shape[1])
    decay = facts.gamma / 4 * smallest**2 * torch.cdist(x, x).square()
    # As logarithms: D itself is beyond all numbers where inputs are long.
    corrected = 2 * facts.gamma * facts.radius**2 * facts.norm_w**2
    as_printed = facts.gamma * facts.radius * facts.norm_w**2
    sizes = c.norm(dim=1)
    kernel, mu = arc_cosine(x, x, variance), facts.norm_w
    printed = mu**2 * torch.exp(as_printed - decay) * kernel
    return SimilarityBounds(
        measured=z @ z.mT,
        bound=torch.outer(pulled, pulled),
        decaying=None
        if facts.betas.shape[1] > 1
        else mu**2 * torch.exp(corrected - decay) * torch.outer(sizes, sizes),
        printed=printed / (1 - facts.beta_max * mu**2) ** 2,
        printed_opteq=kernel / (1 - mu**2) ** 2,
        remark_3=remark_3(corrected, facts.gamma, smallest),
    )


def arc_cosine(x1: Tensor, x2: Tensor, variance: float, units: int = 1) -> Tensor:
    """E⟨σ(Ux₁), σ(Ux₂)⟩ over U of `units` Gaussian rows of this variance (Lemma 3).

    The lemma is of one unit; a layer has as many times that as it has units.
    """
    sizes = torch.outer(x1.norm(dim=1), x2.norm(dim=1))
    cosine = (x1 @ x2.mT / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)).clamp(-1, 1)
    angle = torch.acos(cosine)
    return units * variance * sizes * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)


def expected_opteq_similarity(
    x1: Tensor, x2: Tensor, variance: float, units: int, mu: float
) -> Tensor:
    """A bound of κ of an OptEq that holds: units · E[U²]‖x₁‖‖x₂‖/(2(1 − μ²)²).

    By Cauchy and Schwarz, with ‖z‖ ≤ ‖σ(Ux)‖/(1 − μ²) and E‖σ(Ux)‖² = units · E[U²]‖x‖²/2; Eq. 15
    has the cosine of the angle instead, by a step that vectors need not obey.
    """
    sizes = torch.outer(x1.norm(dim=1), x2.norm(dim=1))
    return units * variance * sizes / (2 * (1 - mu**2) ** 2)


def remark_3(log_d: float, gamma: float, smallest: float) -> float:
    """The distance from which D e^{−¼γσ_min²d²} ≤ 1, and so κ̄ of GEQ is below that of OptEq.

    log_d: log D.
    """
    return quotient(2 * math.sqrt(log_d / gamma), smallest)


def _weights_of_numbers(facts: BranchFacts) -> Tensor:
    """β of every number of the projected patches, in their order."""
    kernel = facts.kernel
    if facts.betas.shape[1] == 1:
        return facts.betas.expand_as(facts.injected)
    like = kernel.W(facts.states, kernel.W.weights(tuple(facts.states.shape[1:])))
    patches = kernel.patches.split(like.detach())
    grid = patches.shape[: grid_dimensions(patches)]
    # `attention` has the groups of channels first, patches have them last.
    maps = facts.betas.reshape(grid[0], grid[-1], *grid[1:-1]).movedim(1, -1)
    numbers = facts.injected.shape[1] // math.prod(grid[1:])
    return maps.flatten(1).repeat_interleave(numbers, dim=1)
