"""Similarity of GEQ's outputs for different inputs: Proposition 4 and Remark 3.

The similarity of two inputs is the inner product κ = ⟨z(x₁), z(x₂)⟩ of their equilibria; κ̄ is its
expectation over random weights U. Proposition 4 as printed is wrong in three ways:

- It omits the number of units.
- Its constant D must be e^{2γB²‖W‖²}.
- Its proof uses ⟨WᵀWz₁, z₂⟩ ≤ μ²⟨z₁, z₂⟩, which does not hold for all vectors.

Remark 3 as printed compares κ̄ of GEQ with itself and omits the factor 1/√γ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.energies.gaussian import grid_dimensions
from equilibria.papers.theory.geq_bounds import BranchFacts, quotient
from equilibria.papers.theory.linear_maps import adjoint, frobenius, least_singular


@dataclass(frozen=True)
class SimilarityBounds:
    """Similarity ⟨z(x₁), z(x₂)⟩ of the equilibria z at every pair of inputs, and bounds on it.

    Every tensor has shape (inputs, inputs).

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> branch, _ = theory.branch_facts(model, torch.rand(3, 1, 8, 8))
        >>> bounds = theory.similarity_bounds(branch)
        >>> bounds.bound.shape, bounds.decaying is None  # the branch has several patches
        (torch.Size([3, 3]), True)
    """

    measured: Tensor
    """⟨z(x₁), z(x₂)⟩, computed from the equilibria."""
    bound: Tensor
    """‖σ(Wᵀ diag(β)(Ux₁ + b))‖ · ‖σ(Wᵀ diag(β)(Ux₂ + b))‖. It holds for any number of patches."""
    decaying: Tensor | None
    """D e^{−¼γσ_min(U)²‖x₁ − x₂‖²}‖W‖²‖Ux₁ + b‖‖Ux₂ + b‖ with D = e^{2γB²‖W‖²}. None if the
    branch has more than one patch."""
    printed: Tensor
    """Eq. 14 with the printed D. It bounds an expectation over random U, not the value at this
    U."""
    printed_opteq: Tensor
    """GEQ's Eq. 15, for an OptEq with the same norm of W."""
    remark_3: float
    """Distance of inputs beyond which D e^{…} ≤ 1: 2√(log D/γ)/σ_min(U)."""


def similarity_bounds(facts: BranchFacts) -> SimilarityBounds:
    """Evaluate GEQ's Proposition 4 for all pairs of inputs of a branch, with corrected bounds.

    The corrected bounds follow from z = σ(v) with v = Wᵀ diag(β)(c − Wz) and c = Ux + b. Because
    ‖z‖² = ⟨z, v⟩ and −⟨Wz, diag(β)Wz⟩ ≤ 0, every equilibrium satisfies
    ‖z‖ ≤ ‖σ(Wᵀ diag(β)c)‖ ≤ β_max‖W‖‖c‖.

    Args:
        facts: The branch with its equilibria, from `branch_facts` or `layer_facts`.

    Returns:
        The measured similarities and bounds on them.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> branch, _ = theory.branch_facts(model, torch.rand(3, 1, 8, 8))
        >>> bounds = theory.similarity_bounds(branch)
        >>> bool((bounds.measured <= bounds.bound).all())
        True
    """
    z, c, x = (part.flatten(1) for part in (facts.states, facts.injected, facts.inputs))
    weights = _weights_of_numbers(facts)
    pulled = adjoint(facts.apply_W, facts.states, weights * c).flatten(1).relu().norm(dim=1)
    smallest = least_singular(facts.apply_U, tuple(facts.inputs.shape[1:]))
    variance = frobenius(facts.apply_U, tuple(facts.inputs.shape[1:])) / (c.shape[1] * x.shape[1])
    decay = facts.gamma / 4 * smallest**2 * torch.cdist(x, x).square()
    # The logarithm of D is used because D itself overflows for inputs with large norms.
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
    """Compute the expectation of ⟨σ(Ux₁), σ(Ux₂)⟩ over Gaussian weights U (GEQ, Lemma 3).

    The lemma states the expectation for one unit. The value for a layer is the number of units
    times that.

    Args:
        x1: Inputs, shape (n, features).
        x2: Inputs, shape (m, features).
        variance: Variance of every entry of U.
        units: Number of rows of U.

    Returns:
        The expectation for every pair, shape (n, m).

    Examples:
        >>> x = torch.eye(2)
        >>> from equilibria.papers.theory.geq_similarity import arc_cosine
        >>> arc_cosine(x, x, variance=1.0).round(decimals=3)  # 1/2 and 1/(2π)
        tensor([[0.5000, 0.1590],
                [0.1590, 0.5000]])
    """
    sizes = torch.outer(x1.norm(dim=1), x2.norm(dim=1))
    cosine = (x1 @ x2.mT / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)).clamp(-1, 1)
    angle = torch.acos(cosine)
    return units * variance * sizes * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)


def expected_opteq_similarity(
    x1: Tensor, x2: Tensor, variance: float, units: int, mu: float
) -> Tensor:
    """Bound the expected similarity of an OptEq's equilibria over Gaussian input weights U.

    The bound is units · E[U²]‖x₁‖‖x₂‖/(2(1 − μ²)²).

    This corrects Eq. 15, which has an additional function of the angle between the inputs. Its
    derivation contains a step that does not hold for all vectors. The bound here follows from the
    Cauchy–Schwarz inequality, ‖z‖ ≤ ‖σ(Ux)‖/(1 − μ²), and E‖σ(Ux)‖² = units · E[U²]‖x‖²/2.

    Args:
        x1: Inputs, shape (n, features).
        x2: Inputs, shape (m, features).
        variance: E[U²], the variance of every entry of U.
        units: Number of rows of U.
        mu: Norm of W, below 1.

    Returns:
        The bound for every pair, shape (n, m).

    Examples:
        >>> x = torch.tensor([[2.0, 0.0]])
        >>> from equilibria.papers.theory.geq_similarity import expected_opteq_similarity
        >>> expected_opteq_similarity(x, x, variance=0.5, units=3, mu=0.0)
        tensor([[3.]])
    """
    sizes = torch.outer(x1.norm(dim=1), x2.norm(dim=1))
    return units * variance * sizes / (2 * (1 - mu**2) ** 2)


def remark_3(log_d: float, gamma: float, smallest: float) -> float:
    """Compute the distance of inputs beyond which GEQ's similarity bound is below OptEq's.

    This is GEQ's Remark 3: the distance d beyond which D e^{−¼γσ_min²d²} ≤ 1.

    Args:
        log_d: log D.
        gamma: γ of the Gaussian kernel.
        smallest: σ_min, the smallest singular value of U.

    Returns:
        2√(log D/γ)/σ_min. It is infinite if σ_min is 0.

    Examples:
        >>> from equilibria.papers.theory.geq_similarity import remark_3
        >>> remark_3(log_d=4.0, gamma=1.0, smallest=0.5)
        8.0
    """
    return quotient(2 * math.sqrt(log_d / gamma), smallest)


def _weights_of_numbers(facts: BranchFacts) -> Tensor:
    """Repeat β of each patch for every entry of the projected patch, in the order of entries."""
    kernel = facts.kernel
    if facts.betas.shape[1] == 1:
        return facts.betas.expand_as(facts.injected)
    like = kernel.W(facts.states, kernel.W.weights(tuple(facts.states.shape[1:])))
    patches = kernel.patches.split(like.detach())
    grid = patches.shape[: grid_dimensions(patches)]
    # `attention` has the groups of channels as its first dimension; patches have them as the last.
    maps = facts.betas.reshape(grid[0], grid[-1], *grid[1:-1]).movedim(1, -1)
    numbers = facts.injected.shape[1] // math.prod(grid[1:])
    return maps.flatten(1).repeat_interleave(numbers, dim=1)
