"""Bounds on the distance of a computed margin from that at the exact equilibrium.

A margin is the difference of two logits. Where logits are ⟨row_k, y⟩ + offset_k, the margin of
class k over class j is read along the direction g = row_k − row_j. ŷ is the state that the solver
computed, y* the exact equilibrium. The logits are read at y′, which is T(ŷ), or σ(−∇E) in the
variables of the hidden objective (`layer.py`). Every bound here is a `MarginBound`:

    |margin(computed) − margin(exact)| ≤ per_residual·residual + per_rounding·rounding.

**By contraction.** Here y′ = T(ŷ). If T is q-Lipschitz, q < 1, and is computed with a rounding
error of at most δ, then ‖y′ − y*‖ ≤ (q‖T(ŷ) − ŷ‖ + δ)/(1 − q) (Banach). The margin is off by at
most ‖g‖ times that. If ⟨g, T⟩ is known to be λ-Lipschitz, it is also off by at most
λ(‖T(ŷ) − ŷ‖ + δ)/(1 − q) + ‖g‖δ.

**By convexity.** The hidden objective G is m-strongly convex, m = 1 − h with −∇²E ≼ h < 1. For any
p ∈ ∂G(y′), ‖y′ − y*‖ ≤ ‖p‖/m, because 0 ∈ ∂G(y*) and ∂G is m-strongly monotone. The margin is off
by at most ‖g‖ times that.

If E is quadratic, more is known along g. Let −∇E(y) = Hy + c, where c = U S(x) + b depends on the
image x through the stem S and the injection U (H = WWᵀ in OptEq). Then y′ is the exact equilibrium
for c + p in the place of c. An equilibrium y = σ(Hy + c) moves with c by dy = X_D dc, where D is
the diagonal matrix of the derivatives σ′, 0 ≤ D ≤ I, and

    X_D = D^½(I − D^½HD^½)⁻¹D^½ = (D⁻¹ − H)⁻¹,    0 ≼ X_D ≼ X_P for all diagonal P, D ≤ P ≤ I,

because (D⁻¹ − H)⁻¹ grows with D. With P = I this is X = (I − H)⁻¹. Hence
|gᵀX_D dc| ≤ √(gᵀX_P g)·√(dcᵀX_P dc) for any g, with dcᵀX_P dc ≤ ‖dc‖²/(1 − h), and the margin is
off by at most √(gᵀXg)·‖p‖/√(1 − h). The equilibrium is Lipschitz in c, hence differentiable almost
everywhere along a segment, and these bounds hold for its whole length.
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

    per_residual: Tensor
    """Error per unit of the residual."""
    per_rounding: Tensor
    """Error per unit of the rounding error."""

    @classmethod
    def by_contraction(
        cls, direction: Tensor, q: Tensor, margin_lipschitz: Tensor | None = None
    ) -> MarginBound:
        """Bound margins at y′ = T(ŷ), as a function of the residual ‖T(ŷ) − ŷ‖.

        Args:
            direction: ‖g‖ of each margin.
            q: Lipschitz constant of T, in a shape that broadcasts against `direction`.
            margin_lipschitz: λ, Lipschitz constant of ⟨g, T⟩ for each margin, if it is known.

        Returns:
            A bound with per_residual = min(‖g‖q, λ)/(1 − q) and per_rounding = ‖g‖ + per_residual;
            infinite where q ≥ 1.
        """
        inverse = 1 / (1 - q).clamp_min(0)  # ∞ where q ≥ 1
        per_residual = direction * (q * inverse)
        if margin_lipschitz is not None:
            per_residual = torch.minimum(per_residual, margin_lipschitz * inverse)
        return cls(per_residual, direction + per_residual)

    @classmethod
    def by_convexity(
        cls, direction: Tensor, convexity: Tensor, quadratic: Tensor | None = None
    ) -> MarginBound:
        """Bound margins at y′, as a function of the residual ‖p‖ for a subgradient p ∈ ∂G(y′).

        Args:
            direction: ‖g‖ of each margin.
            convexity: m, in a shape that broadcasts against `direction`.
            quadratic: gᵀXg of each margin, if X is known.

        Returns:
            A bound with per_residual = per_rounding = min(‖g‖/m, √(gᵀXg/m)); infinite where m ≤ 0.
        """
        inverse = 1 / convexity.clamp_min(0)
        per_residual = direction * inverse
        if quadratic is not None:
            per_residual = torch.minimum(per_residual, (quadratic * inverse).sqrt())
        return cls(per_residual, per_residual)

    def error(self, residual: Tensor, rounding: Tensor) -> Tensor:
        """Evaluate the bound for the residual and the rounding error of each sample."""
        # An infinite per_residual stays infinite where the residual is 0.
        tiny = torch.finfo(residual.dtype).tiny
        return (
            self.per_residual * residual.clamp_min(tiny)[:, None]
            + self.per_rounding * rounding.clamp_min(tiny)[:, None]
        )

    def of(self, classes: Tensor) -> MarginBound:
        """Select the rows of these classes, one per sample."""
        return MarginBound(self.per_residual[classes], self.per_rounding[classes])

    def widened(self) -> MarginBound:
        """Enlarge the bound by the rounding error of computing it in float64."""
        return MarginBound(
            self.per_residual * (1 + NORM_SLACK), self.per_rounding * (1 + NORM_SLACK)
        )

    @property
    def is_known(self) -> bool:
        """Whether every margin has a finite bound."""
        return bool(self.per_residual.isfinite().all())


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
    quadratic: Tensor | None = None
    """Upper bound on gᵀXg, where X is known."""
    pulled_length: Tensor | None = None
    """Length of (US)ᵀu for u ≈ Xg, where a stem S is known too (`radii.py`)."""
    remainder: Tensor | None = None
    """Upper bound on ‖u − Xg‖, with the rounding of `pulled_length` as a share of ‖u‖."""


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
        _, quadratic = pairs.quadratic()
        if self.pulled is None or self.length is None:
            return ClassDifferences(direction, quadratic)
        pulled_length = self.length(self.pulled[k] - self.pulled)
        return ClassDifferences(direction, quadratic, pulled_length, remainder(pairs))


def remainder(pairs: Resolved) -> Tensor:
    """Bound the difference of the lengths of (US)ᵀu and (US)ᵀXg, in units of ‖U‖Λ."""
    size: Tensor = torch.linalg.vector_norm(pairs.solution, dim=-1)
    return size * NORM_SLACK + pairs.error()
