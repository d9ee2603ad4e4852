"""Bounds on the distance of a computed margin from that at the exact equilibrium.

A margin is the difference of two logits. Where logits are ⟨row_k, y⟩ + offset_k, the margin of
class k over class j is read along the direction g = row_k − row_j. Every bound here has one form,
`MarginBound`:

    |margin(computed) − margin(exact)| ≤ slope·residual + blur·rounding.

**By contraction.** If T is q-Lipschitz, q < 1, and is computed with a rounding error of at most δ,
then ‖T(y) − y*‖ ≤ (q‖T(y) − y‖ + δ)/(1 − q) (Banach). The margin is off by at most ‖g‖ times that.
If ⟨g, T⟩ is known to be λ-Lipschitz, it is also off by at most λ(‖T(y) − y‖ + δ)/(1 − q) + ‖g‖δ.

**By convexity.** The hidden objective G is m-strongly convex, m = 1 − h with −∇²E ≼ h < 1. Let E be
quadratic, −∇E(y) = Hy + c, where c = U S(x) + b depends on the image x (H = WWᵀ in OptEq), and let
p ∈ ∂G(y). Then y is the exact equilibrium for c + p in the place of c, so that ‖y − y*‖ ≤ ‖p‖/m.
Along g more is known. An equilibrium y = σ(Hy + c) with 0 ≤ σ′ ≤ 1 moves with c by dy = X_D dc,
where D = σ′ and

    X_D = D^½(I − D^½HD^½)⁻¹D^½ = (D⁻¹ − H)⁻¹,    0 ≼ X_D ≼ X_P for all D ≤ P,

because (D⁻¹ − H)⁻¹ grows with D. Hence |gᵀX_D dc| ≤ √(gᵀX_P g)·√(dcᵀX_P dc) for any g, with
dcᵀX_P dc ≤ ‖dc‖²/(1 − h), and the margin is off by at most √(gᵀXg)·‖p‖/√(1 − h), X = (I − H)⁻¹. The
equilibrium is Lipschitz in c, hence differentiable almost everywhere along a segment, and these
bounds hold for its whole length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from equilibria.certificates.resolvent import Resolved
from equilibria.operators.rounding import NORM_SLACK


@dataclass(frozen=True)
class MarginBound:
    """The error of margins as a function of the residual and of the rounding error.

    The last dimension runs over the other classes. The first one runs over the samples, or over the
    predicted classes if the bound holds for every sample (`of`).
    """

    slope: Tensor
    """Error per unit of the residual."""
    blur: Tensor
    """Error per unit of the rounding error."""

    @classmethod
    def by_contraction(
        cls, direction: Tensor, q: Tensor, along: Tensor | None = None
    ) -> MarginBound:
        """Bound margins at T(y), whose residual is ‖T(y) − y‖.

        Args:
            direction: ‖g‖ of each margin.
            q: Lipschitz constant of T, in a shape that broadcasts against `direction`.
            along: λ, Lipschitz constant of ⟨g, T⟩ for each margin, if it is known.

        Returns:
            A bound with slope min(‖g‖q, λ)/(1 − q) and blur ‖g‖ + slope; infinite where q ≥ 1.
        """
        inverse = 1 / (1 - q).clamp_min(0)  # ∞ where q ≥ 1
        slope = direction * (q * inverse)
        if along is not None:
            slope = torch.minimum(slope, along * inverse)
        return cls(slope, direction + slope)

    @classmethod
    def by_convexity(
        cls, direction: Tensor, convexity: Tensor, form: Tensor | None = None
    ) -> MarginBound:
        """Bound margins at y, whose residual is ‖p‖ for a subgradient p ∈ ∂G(y).

        Args:
            direction: ‖g‖ of each margin.
            convexity: m, in a shape that broadcasts against `direction`.
            form: gᵀXg of each margin, if X is known.

        Returns:
            A bound with slope and blur min(‖g‖/m, √(gᵀXg/m)); infinite where m ≤ 0.
        """
        inverse = 1 / convexity.clamp_min(0)
        slope = direction * inverse
        if form is not None:
            slope = torch.minimum(slope, (form * inverse).sqrt())
        return cls(slope, slope)

    def error(self, residual: Tensor, rounding: Tensor) -> Tensor:
        """Evaluate the bound for the residual and the rounding error of each sample."""
        # An infinite slope stays infinite where the residual is 0.
        tiny = torch.finfo(residual.dtype).tiny
        return (
            self.slope * residual.clamp_min(tiny)[:, None]
            + self.blur * rounding.clamp_min(tiny)[:, None]
        )

    def of(self, classes: Tensor) -> MarginBound:
        """Select the rows of these classes, one per sample."""
        return MarginBound(self.slope[classes], self.blur[classes])

    def widened(self) -> MarginBound:
        """Enlarge the bound by the rounding error of computing it in float64."""
        return MarginBound(self.slope * (1 + NORM_SLACK), self.blur * (1 + NORM_SLACK))

    @property
    def is_known(self) -> bool:
        """Whether every margin has a finite bound."""
        return bool(self.slope.isfinite().all())


@dataclass(frozen=True)
class Margins:
    """The margins of each sample over all classes, with their error bounds."""

    best: Tensor
    """Class with the largest logit."""
    margin: Tensor
    """Logit of that class minus the logit of every class, (samples, classes)."""
    error: Tensor
    """Upper bound on the error of each margin."""
    is_own: Tensor
    """Mask of the class with the largest logit, (samples, classes)."""

    @classmethod
    def of(cls, logits: Tensor, error: Tensor) -> Margins:
        """Compute the margins from logits."""
        best = logits.argmax(dim=1)
        margin = logits.gather(1, best[:, None]) - logits
        is_own = torch.zeros_like(margin, dtype=torch.bool).scatter(1, best[:, None], True)
        return cls(best, margin, error, is_own)

    @property
    def are_certain(self) -> Tensor:
        """Whether every margin of a sample exceeds its error, so that the class is certain."""
        return ((self.margin > self.error) | self.is_own).all(dim=1)

    def radius(self, steepness: Tensor) -> Tensor:
        """Return how far the image can move before any margin may vanish.

        It is 0 if some margin does not exceed its error.

        Args:
            steepness: Lipschitz constant of each margin in the image, (samples, classes).

        Returns:
            min_j room_j/steepness_j per sample, room = margin − error.
        """
        nearest = self.distances(steepness).amin(dim=1)
        return nearest.clamp_min(0) * (1 - NORM_SLACK)

    def distances(self, steepness: Tensor) -> Tensor:
        """Return room_j/steepness_j; infinite for the class itself."""
        room = self.margin - self.error
        distance = room / steepness.clamp_min(torch.finfo(steepness.dtype).tiny)
        return torch.where(self.is_own, torch.inf, distance)

    def keep(self, rows: Tensor) -> Margins:
        """Select some samples."""
        return Margins(self.best[rows], self.margin[rows], self.error[rows], self.is_own[rows])


@dataclass(frozen=True)
class ClassDifferences:
    """Norms of the directions g = row_k − row_j, (samples, classes), k the class of each sample."""

    direction: Tensor
    """‖g‖."""
    form: Tensor | None = None
    """Upper bound on gᵀXg, where X is known."""
    along: Tensor | None = None
    """Length of (US)ᵀu for u ≈ Xg, where a stem S is known too (`radii.py`)."""
    remainder: Tensor | None = None
    """Upper bound on ‖u − Xg‖, with the rounding of `along` as a share of ‖u‖."""


class ClassPairs:
    """Cache of what margin certificates need about the differences of two class logits.

    It depends on the parameters only, and is computed for a class (against all classes) when the
    class first occurs. Notation: w_k is the row of class k in the linear readout, X = (I − H)⁻¹
    with H the negative Hessian of the layer's quadratic energy, U the layer's input operator, and S
    the linear stem before it.

    Args:
        rows: The readout w, one row per class, in float64.
        resolved: Approximate solutions u_k ≈ X w_k, or None if X is not known.
        pulled: Gradients (US)ᵀu_k of the logits in the pixels of the image, one row per class; None
            if the model has no linear stem.
        length: Norm of such gradients, dual to the norm in which images are perturbed (L1 for
            L∞ perturbations).
    """

    def __init__(
        self,
        rows: Tensor,
        resolved: Resolved | None = None,
        pulled: Tensor | None = None,
        length: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.rows = rows
        self.resolved = resolved
        self.pulled = pulled
        self.length = length
        self._cache: dict[int, ClassDifferences] = {}

    def of(self, classes: Tensor) -> ClassDifferences:
        """Return the differences of one class per sample to all classes."""
        present, place = torch.unique(classes, return_inverse=True)
        by_class = [self._of_class(k) for k in present.tolist() or [0]]

        def gathered(name: str) -> Tensor | None:
            known = [value for item in by_class if (value := getattr(item, name)) is not None]
            return torch.stack(known)[place] if known else None

        entries = {field.name: gathered(field.name) for field in fields(ClassDifferences)}
        return ClassDifferences(**entries)  # type: ignore[arg-type]

    def of_all(self) -> ClassDifferences:
        """Return the differences of every class to all classes, (classes, classes)."""
        return self.of(torch.arange(len(self.rows), device=self.rows.device))

    def _of_class(self, k: int) -> ClassDifferences:
        if k not in self._cache:
            self._cache[k] = self._compute(k)
        return self._cache[k]

    def _compute(self, k: int) -> ClassDifferences:
        direction = torch.linalg.vector_norm(self.rows[k] - self.rows, dim=1)
        if self.resolved is None:
            return ClassDifferences(direction)
        others = torch.arange(len(self.rows), device=self.rows.device)
        pairs = self.resolved.difference(torch.full_like(others, k), others)
        _, form = pairs.form()
        if self.pulled is None or self.length is None:
            return ClassDifferences(direction, form)
        along = self.length(self.pulled[k] - self.pulled)
        return ClassDifferences(direction, form, along, remainder(pairs))


def remainder(pairs: Resolved) -> Tensor:
    """Bound the difference of the lengths of (US)ᵀu and (US)ᵀXg, in units of ‖U‖Λ."""
    size: Tensor = torch.linalg.vector_norm(pairs.solution, dim=-1)
    return size * NORM_SLACK + pairs.error()
