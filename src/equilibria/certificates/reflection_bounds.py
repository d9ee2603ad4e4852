"""Bounds on single reflections: steepness, rounding errors, and errors of computed states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.certificates.facts import UNIT
from equilibria.certificates.states import norms
from equilibria.models.reflection.dual import DualReflectionCell
from equilibria.models.reflection.orthonormal import OrthonormalReflectionCell
from equilibria.operators.rounding import NORM_SLACK, accumulated, unit_roundoff, upper_norm


@dataclass(frozen=True)
class ClosedFormBound:
    """Bounds on a reflection R(u) = u − τQᵀσ(Qu + b) and its computation."""

    steepness: float
    """Upper bound on the Lipschitz constant; 1 if τ‖Q‖² ≤ 2."""
    per_size: float
    """Rounding error per unit of ‖u‖."""
    per_bias: float
    """Rounding error per patch, which adds up in squares."""

    @classmethod
    @torch.no_grad()
    def of(
        cls, cell: OrthonormalReflectionCell, used: OrthonormalReflectionCell | None = None
    ) -> ClosedFormBound:
        """Compute the bounds for the stored weights of a cell in float64.

        Args:
            cell: The cell in float64.
            used: The cell in the type that computes; by default float64.

        ‖Q‖² is at most the largest absolute row sum of QQᵀ. With φ = ‖Q‖_F, n columns and r rows,
        Qu + b has a rounding error of at most e = γ_(n+1)(φ‖u‖ + ‖b‖), and Qᵀy, y = σ(Qu + b), one
        of γ_r φ‖y‖ + ‖Q‖e with ‖y‖ ≤ ‖Q‖‖u‖ + ‖b‖ + e. The remaining additions are rounded six
        times. The rows of `used` are rounded too, by d = ‖Q − fl(Q)‖_F.
        """
        (rows,), bias = cell.ridge.W.weights(), cell.ridge.bias
        unit, gap = UNIT, 0.0
        if used is not None:
            (rounded,) = used.ridge.W.weights()
            unit = unit_roundoff(rounded.dtype)
            gap = float(torch.linalg.vector_norm(rounded.double() - rows)) * (1 + NORM_SLACK)
        height, width = rows.shape
        length = float(torch.linalg.vector_norm(rows)) * (1 + NORM_SLACK)
        sums = float((rows @ rows.mT).abs().sum(dim=1).max())
        square = (sums + accumulated(width + height, UNIT) * length**2) * (1 + NORM_SLACK)
        norm, tau = math.sqrt(square), 2 * cell.weight / (1 + cell.weight)
        offset = 0.0 if bias is None else float(torch.linalg.vector_norm(bias))

        def error(u: float, b: float) -> float:
            lifted = accumulated(width + 1, unit) * ((length + gap) * u + b) + gap * u
            active = norm * u + b + lifted
            pull = accumulated(height, unit) * (length + gap) * active + gap * active
            pull = pull + norm * lifted
            return (tau * pull + 6 * unit * (3 * u + 2 * tau * norm * active)) * (1 + NORM_SLACK)

        return cls(max(1.0, tau * square - 1), error(1.0, 0.0), error(0.0, offset))

    def rounding(self, u: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Return an upper bound on the rounding error of R(u) for each sample.

        Args:
            u: Inputs of the layer.
            sizes: Upper bounds on their norms; by default computed.
        """
        patches = math.prod(u.shape[1:-1])
        sizes = norms(u) if sizes is None else sizes
        return sizes * self.per_size + math.sqrt(patches) * self.per_bias


@dataclass(frozen=True)
class DualBound:
    """Error of a reflection R(u) = u − 2Wᵀy at a computed y ≥ 0, in float64.

    Let p be the subgradient of minimal norm of the dual objective at y, and e = y − y*. The
    subdifferential minus (I + WWᵀ) is monotone, so that ‖e‖² + ‖Wᵀe‖² ≤ ⟨p, e⟩ ≤ ‖p‖‖e‖. Hence
    ‖Wᵀe‖² ≤ ‖p‖‖e‖ − ‖e‖² ≤ ‖p‖²/4, and R is off by at most ‖p‖.
    """

    norm: float
    """Upper bound on ‖W‖."""
    length: float
    """‖W‖_F."""
    offset: float
    """‖b‖."""

    @classmethod
    @torch.no_grad()
    def of(cls, cell: DualReflectionCell) -> DualBound:
        """Compute the bounds for the stored weights of a cell in float64."""
        W, bias = cell.dual.W, cell.dual.bias
        sizes = (torch.linalg.vector_norm(t) for t in (W.weight, bias))
        length, offset = (float(size) * (1 + NORM_SLACK) for size in sizes)
        return cls(upper_norm(W, (W.in_features,)), length, offset)

    def reflected(
        self, cell: DualReflectionCell, u: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return R(u) at a state, ½‖p‖, and a bound on the rounding error of R(u) and of p."""
        y = state.clamp(min=0)
        context = cell.inject(u)
        weights = (context["W"],)
        pulled = cell.dual.W.adjoint(y, weights)
        gradient = y + cell.dual.W(pulled, weights) - context["c"]
        minimal = torch.where(y > 0, gradient, gradient.clamp(max=0))
        rows, columns = context["W"].shape
        sizes, lengths = norms(u), norms(y)
        lifted = accumulated(columns + 1, UNIT) * (self.length * sizes + self.offset)
        adjoint = accumulated(rows, UNIT) * self.length * lengths
        second = accumulated(columns, UNIT) * self.length * (self.norm * lengths + adjoint)
        terms = (1 + self.norm**2) * lengths + self.norm * sizes + self.offset
        rounding = lifted + self.norm * adjoint + second + 6 * UNIT * terms
        rounding = rounding + 2 * adjoint + 3 * UNIT * (sizes + 2 * self.norm * lengths)
        feature = torch.sub(u, pulled, alpha=2)
        return feature, norms(minimal) / 2, rounding * (1 + 1e-6)
