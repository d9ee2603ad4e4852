"""Generalization bounds of GEQ: Proposition 2 and Remark 1.

The printed constants differ from those of the proof. The proof also assumes that β does not depend
on the weights. Neither bound is therefore a certificate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.models.base import EquilibriumClassifier
from equilibria.models.geq.model import GEQCell
from equilibria.papers.theory.geq_bounds import BranchFacts, branch_facts, projected
from equilibria.papers.theory.linear_maps import frobenius, gram_frobenius


@dataclass(frozen=True)
class GeneralizationBounds:
    """Bounds of GEQ's Proposition 2 on the expected error, with probability 1 − δ.

    The probability is over training sets of M samples.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
        >>> bounds = theory.generalization_bounds(model, images, labels)
        >>> [condition for condition in bounds.conditions if "Remark 1" in condition]
        ['Remark 1: β_max < 0.8', 'Remark 1: μ, m > 0.9']
    """

    margin_loss: float
    """Fraction of training samples whose margin is at most η, the margin of the bound."""
    printed: float
    """GEQ's bound as printed (Eq. 10)."""
    printed_opteq: float
    """The bound as printed for an OptEq with the same norms (Remark 1)."""
    by_proof: float
    """The bound with the constants of Lemma 2 and Eqs. 30 to 37, for the GEQ. It keeps their
    assumption on β."""
    by_proof_opteq: float
    """The bound with these constants, for an OptEq with the same norms."""
    conditions: Mapping[str, bool]
    """Assumptions of Proposition 2 and Remark 1, and whether each holds."""


def generalization_bounds(
    model: EquilibriumClassifier,
    images: Tensor,
    labels: Tensor,
    *,
    margin: float = 1.0,
    delta: float = 0.05,
) -> GeneralizationBounds:
    """Evaluate the generalization bounds of GEQ's Proposition 2 at training samples.

    Parallel branches count as one branch whose state contains all of theirs. For trained networks,
    bounds of this kind are far above 1 and therefore carry no information. They are infinite if
    β_max‖W‖² ≥ 1, and for an OptEq if ‖W‖ ≥ 1.

    Args:
        model: A GEQ with ReLU, whose γ does not depend on the input. It is not modified.
        images: Training images, shape (M, C, H, W).
        labels: Their classes, shape (M,).
        margin: η, the margin of the training error, above 0.
        delta: δ, the probability that the bound does not hold, between 0 and 1.

    Returns:
        The bounds as printed and with the constants of the proof, and the assumptions checked.

    Raises:
        TypeError: If the cell of the model is not a `GEQCell`.
        ValueError: If a bound is unknown for the model, or if there are fewer than two samples, or
            if `margin` or `delta` is out of range.

    Examples:
        >>> from equilibria.papers import theory
        >>> model = eq.create_model("geq-small", in_channels=1, channels=8, widths=(8, 8))
        >>> images, labels = torch.rand(2, 1, 8, 8), torch.tensor([0, 1])
        >>> bounds = theory.generalization_bounds(model, images, labels)
        >>> bounds.margin_loss <= bounds.printed
        True
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
    """Quantities of GEQ's Proposition 2 (a PAC-Bayes bound), and the two forms of its bound.

    Examples:
        >>> from equilibria.papers.theory.geq_generalization import PacBayes
        >>> numbers = PacBayes(
        ...     mu=0.95, m=0.9, beta_max=0.7, radius=2.0, units=10, weights=3.0,
        ...     samples=1000, margin=1.0, delta=0.05,
        ... )
        >>> numbers.printed() < numbers.printed(is_opteq=True)  # Remark 1
        True
    """

    mu: float
    """μ, the largest norm of W, U, the head and the biases."""
    m: float
    """m, the norm ‖WᵀW‖ of the branch's operator."""
    beta_max: float
    """Largest attention weight β."""
    radius: float
    """B, the largest norm of an input."""
    units: int
    """h, the largest dimension of an input, a hidden layer, or a state."""
    weights: float
    """𝓑_W, the sum of the squared Frobenius norms of WᵀW, U, the head and the biases."""
    samples: int
    """M, the number of training samples; at least 2."""
    margin: float
    """η, the margin of the training error; above 0."""
    delta: float
    """δ, the probability that the bound does not hold; between 0 and 1."""

    def __post_init__(self) -> None:
        if not (self.samples > 1 and self.margin > 0 and 0 < self.delta < 1):
            raise ValueError(
                f"need samples >= 2, margin > 0 and 0 < delta < 1, got samples={self.samples}, "
                f"margin={self.margin:g}, delta={self.delta:g}"
            )

    def printed(self, *, is_opteq: bool = False) -> float:
        """Evaluate GEQ's generalization bound (Eq. 10) with the constants that the paper prints.

        The constants of the paper's proof differ from these; `by_proof` evaluates the bound with
        them.

        Args:
            is_opteq: Whether to evaluate the bound of OptEq (Remark 1) instead of that of GEQ. It
                has 1 in place of the largest attention weight β.

        Returns:
            The amount by which the bound exceeds the training error.
        """
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
        """Evaluate GEQ's generalization bound with the constants of the proof, not those printed.

        It is 4√((KL + ln(6M√M/δ))/(M − 1)) for M samples, probability 1 − δ and the divergence KL.
        The constants follow from Lemma 2 and the perturbation bounds of Eqs. 30 and 35.

        Args:
            is_opteq: Whether to use the form for an OptEq.

        Returns:
            The amount by which the bound exceeds the training error.
        """
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
    """Compute the fraction of samples not classified correctly with a margin (GEQ, Eq. 9).

    Args:
        logits: Shape (samples, classes).
        labels: Shape (samples,).
        margin: Amount by which the logit of the label must exceed all others.

    Returns:
        The fraction, between 0 and 1.

    Examples:
        >>> logits = torch.tensor([[3.0, 1.0], [3.0, 2.5]])
        >>> from equilibria.papers.theory.geq_generalization import margin_loss
        >>> margin_loss(logits, torch.tensor([0, 0]), margin=1.0)
        0.5
    """
    of_label = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((of_label <= margin + others).double().mean())


def _head(model: EquilibriumClassifier, branches: list[BranchFacts]) -> tuple[Tensor, Tensor]:
    """Return the head as a matrix and an offset, for the concatenated states of all branches."""
    cell = model.layer.cell
    assert isinstance(cell, GEQCell)
    states = [torch.zeros_like(facts.states[:1], requires_grad=True) for facts in branches]
    with torch.enable_grad():
        logits = model.head(cell.fuse(states))[0]
        rows = [
            torch.cat(
                [part.flatten() for part in torch.autograd.grad(logit, states, retain_graph=True)]
            )
            for logit in logits
        ]
    return torch.stack(rows), logits.detach()


def _bias(facts: BranchFacts, nothing: Tensor) -> float:
    """Return ‖b‖, computed as the norm of Ux + b at x = 0."""
    with torch.no_grad():
        return float(projected(facts.kernel, facts.kernel.inject(nothing)["c"]).norm())
