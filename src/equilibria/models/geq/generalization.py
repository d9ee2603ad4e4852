"""How far GEQ's errors on training and test samples are apart: Proposition 2 and Remark 1.

The printed constants are not those that the proof arrives at, and the proof assumes that β does not
change with the weights: neither number is a certificate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.models.base import EquilibriumClassifier
from equilibria.models.geq.bounds import BranchFacts, branch_facts, projected
from equilibria.models.geq.linear_maps import frobenius, gram_frobenius
from equilibria.models.geq.model import GEQCell


@dataclass(frozen=True)
class GeneralizationBounds:
    """Bounds of the expected error, with probability 1 − δ over training sets of M samples."""

    margin_loss: float
    """The share of training samples within the margin η."""
    printed: float
    """Eq. 10, of the GEQ."""
    printed_opteq: float
    """Eq. 10, of an OptEq with the same norms."""
    by_proof: float
    """With the constants of Lemma 2 and Eqs. 30 to 37; under their assumption on β."""
    by_proof_opteq: float
    conditions: Mapping[str, bool]
    """What the proposition and Remark 1 assume, and whether it is so."""


def generalization_bounds(
    model: EquilibriumClassifier,
    images: Tensor,
    labels: Tensor,
    *,
    margin: float = 1.0,
    delta: float = 0.05,
) -> GeneralizationBounds:
    """Proposition 2 of a GEQ at its training samples; parallel branches are one, side by side.

    Bounds of this kind are far above 1 for trained networks, which says nothing about them. Where
    β_max‖W‖² ≥ 1, and for OptEq where ‖W‖ ≥ 1, they are infinite.
    """
    branches = branch_facts(model, images)
    precise = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        logits = precise(images.double())
    head, offset = _head(precise, branches)
    shape = tuple(branches[0].inputs.shape[1:])
    nothing = torch.zeros(1, *shape, dtype=torch.float64)
    biases = [_bias(facts, nothing) for facts in branches]
    sizes = [math.prod(shape), head.shape[1], *(facts.injected.shape[1] for facts in branches)]
    W = max(facts.norm_w for facts in branches)
    mu = max(
        W,
        math.sqrt(sum(facts.norm_u**2 for facts in branches)),
        float(torch.linalg.matrix_norm(head, 2)),
        math.sqrt(sum(bias**2 for bias in biases)),
    )
    weights = sum(
        gram_frobenius(facts.apply_W, tuple(facts.states.shape[1:]))
        + frobenius(facts.apply_U, shape)
        for facts in branches
    )
    weights += sum(bias**2 for bias in biases) + float(head.square().sum() + offset.square().sum())
    beta_max = max(facts.beta_max for facts in branches)
    numbers = PacBayes(
        mu=mu,
        m=W**2,
        beta_max=beta_max,
        radius=float(branches[0].inputs.flatten(1).norm(dim=1).max()),
        units=max(sizes),
        weights=float(weights),
        samples=len(images),
        margin=margin,
        delta=delta,
    )
    loss = margin_loss(logits, labels, margin)
    return GeneralizationBounds(
        margin_loss=loss,
        printed=loss + numbers.printed(),
        printed_opteq=loss + numbers.printed(is_opteq=True),
        by_proof=loss + numbers.by_proof(),
        by_proof_opteq=loss + numbers.by_proof(is_opteq=True),
        conditions={
            "μ < 1": mu < 1,
            "m < 1": W < 1,
            "Remark 1: β_max < 0.8": beta_max < 0.8,
            "Remark 1: μ, m > 0.9": min(mu, W**2) > 0.9,
        },
    )


@dataclass(frozen=True)
class PacBayes:
    """The numbers of Proposition 2: m = ‖WᵀW‖, `weights` 𝓑_W, `units` h, `margin` η."""

    mu: float
    m: float
    beta_max: float
    radius: float
    units: int
    weights: float
    samples: int
    margin: float
    delta: float

    def __post_init__(self) -> None:
        if not (self.samples > 1 and self.margin > 0 and 0 < self.delta < 1):
            raise ValueError(
                "give two samples or more, a margin above 0, and delta between 0 and 1"
            )

    def printed(self, *, is_opteq: bool = False) -> float:
        """The root of Eq. 10."""
        mu, B = self.mu, self.radius
        room = 1 - (1.0 if is_opteq else self.beta_max) * self.m
        if is_opteq:
            bracket = mu**3 * B + room * mu * B + room**2
        else:
            slope = 2 * mu * self.beta_max + 1
            bracket = self.beta_max * mu**4 * B + slope * room * mu * B + room**2
        divergence = self._divergence(bracket, room)
        chance = math.log(self.samples**1.5 / self.delta)
        return math.sqrt((divergence + chance) / self.samples)

    def by_proof(self, *, is_opteq: bool = False) -> float:
        """4√((KL + ln(6M√M/δ))/(M − 1)), of Lemma 2 and the perturbations of Eqs. 30 and 35."""
        mu, B = self.mu, self.radius + 1
        room = 1 - (1.0 if is_opteq else self.beta_max) * self.m
        if is_opteq:
            bracket = 2 * mu**2 * B + 2 * room * mu * B + room**2
        else:
            slope = 2 * mu * self.beta_max + 1
            bracket = 2 * self.beta_max * mu**3 * B + 2 * slope * room * mu * B + room**2
        divergence = self._divergence(bracket, room)
        chance = math.log(6 * self.samples**1.5 / self.delta)
        return 4 * math.sqrt((divergence + chance) / (self.samples - 1))

    def _divergence(self, bracket: float, room: float) -> float:
        if room <= 0:
            return math.inf
        scale = 16 * self.units * math.log(24 * self.units)
        return scale * bracket**2 * self.weights / (self.margin**2 * room**4)


def margin_loss(logits: Tensor, labels: Tensor, margin: float) -> float:
    """The share of samples whose logit is not more than `margin` above all others (Eq. 9)."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((own <= margin + others).double().mean())


def _head(model: EquilibriumClassifier, branches: list[BranchFacts]) -> tuple[Tensor, Tensor]:
    """Logits as a matrix and an offset of all states side by side."""
    cell = model.layer.cell
    assert isinstance(cell, GEQCell)
    states = [torch.zeros_like(facts.states[:1], requires_grad=True) for facts in branches]
    with torch.enable_grad():
        logits = model.head(cell.fuse(states))[0]
        rows = [
            torch.cat(
                [part.flatten() for part in torch.autograd.grad(one, states, retain_graph=True)]
            )
            for one in logits
        ]
    return torch.stack(rows), logits.detach()


def _bias(facts: BranchFacts, nothing: Tensor) -> float:
    """‖b‖, of Ux + b where x is zero."""
    with torch.no_grad():
        return float(projected(facts.kernel, facts.kernel.inject(nothing)["c"]).norm())
