"""The resolvent X = (I − H)⁻¹ of a quadratic energy: linear solves with error bounds.

H = −∇²E ≼ h < 1 is the negative Hessian of the energy. For a mask P of units, X_P = (P − PHP)⁺.
The iterations need not be exact: `Resolved` bounds the error of every result by its residual.
`margins.py` explains the use of X.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.context import Context
from equilibria.context.context import Entry
from equilibria.context.state import Layout, Packing
from equilibria.context.twin import twin
from equilibria.energies import Energy
from equilibria.solvers import conjugate_gradients
from equilibria.solvers.linear.base import LinearMap

RESOLVENT_TOLERANCE = 1e-4
"""Relative tolerance of the linear solves. The square of the residual enters the bounds."""


class Resolvent:
    """Solve linear systems with X or X_P, in float64.

    Args:
        energy: Quadratic energy.
        context: Tensors that the energy reads besides the state; only those that depend on
            parameters alone, not on the input, are used.
        layout: Shapes of the state.
        concavity: Upper bound h < 1 of the eigenvalues of H.

    Raises:
        ValueError: If the energy is not quadratic.
    """

    def __init__(self, energy: Energy, context: Context, layout: Layout, concavity: float) -> None:
        if not energy.facts.is_quadratic:
            raise ValueError(f"{energy} is not quadratic: its curvature depends on the state")
        self.energy = energy
        self.context = context
        self.packing = Packing(layout, len(layout) == 1, 0, channels_last=(False,) * len(layout))
        self.convexity = 1 - concavity

    def solve(self, rows: Tensor) -> Resolved:
        """Compute Xg for every row g."""
        product = self._product(self.energy, self.context, len(rows))
        solution = _conjugate_gradients(product, rows)
        return Resolved(rows, solution, rows - product(solution), self.convexity)

    def solve_masked(self, rows: Tensor, mask: Tensor, start: Tensor) -> Resolved:
        """Compute X_P g for every row g.

        The iterations run in float32, the residual is evaluated in float64. The bounds hold for
        any outcome of the iterations.

        Args:
            rows: The rows g, (rows, units).
            mask: P, one row of zeros and ones for each g.
            start: Initial guess of the solutions.

        Returns:
            The solutions with their residuals, in the type of `rows`.
        """
        given = rows * mask
        product = self._product(self.energy, self.context, len(rows), mask)
        rough = self._product(*self._in_single, len(rows), mask.float())
        solution = _conjugate_gradients(rough, given.float(), (start * mask).float()).to(given)
        return Resolved(given, solution, given - product(solution), self.convexity)

    @functools.cached_property
    def _in_single(self) -> tuple[Energy, Context]:
        """The energy and its context in float32."""

        def single(tensor: Tensor) -> Tensor:
            return tensor.detach().float() if tensor.is_floating_point() else tensor

        context = self.context.replace([single(tensor) for tensor in self.context.tensors()])
        return twin(self.energy, single), context

    def _product(
        self, energy: Energy, context: Context, rows: int, mask: Tensor | None = None
    ) -> LinearMap:
        """Return the map v ↦ v − PHPv for this number of rows."""
        context = without_input(context, rows)
        packing = replace(self.packing, samples=rows)

        def product(v: Tensor) -> Tensor:
            masked = v if mask is None else v * mask
            image = packing.pack(energy.descent(packing.unpack(masked), context))
            return v - (image if mask is None else image * mask)

        return product


def _conjugate_gradients(product: LinearMap, rows: Tensor, start: Tensor | None = None) -> Tensor:
    solution = conjugate_gradients(
        product, rows, start=start, tolerance=RESOLVENT_TOLERANCE, max_iterations=200
    )
    return solution.value


@dataclass(frozen=True)
class Resolved:
    """Approximate solutions u ≈ Xg of (I − H)u = g, X = (I − H)⁻¹, with their residuals.

    Attributes:
        rows: Right-hand sides g, shape (rows, units).
        solution: u.
        residual: e = g − X⁻¹u.
        convexity: Lower bound 1 − h > 0 on the eigenvalues of X⁻¹.
    """

    rows: Tensor
    solution: Tensor
    residual: Tensor
    convexity: float

    def difference(self, first: Tensor, second: Tensor) -> Resolved:
        """Return the solutions for the rows g_i − g_j, i in `first` and j in `second`."""

        def between(of: Tensor) -> Tensor:
            return of[first] - of[second]

        return Resolved(
            between(self.rows), between(self.solution), between(self.residual), self.convexity
        )

    def quadratic(self) -> tuple[Tensor, Tensor]:
        """Bound gᵀXg from below and above: uᵀ(g + e), and at most eᵀXe ≤ ‖e‖²/(1 − h) more."""
        low = (self.solution * (self.rows + self.residual)).sum(dim=-1).clamp_min(0)
        return low, low + self.residual.square().sum(dim=-1) / self.convexity

    def error(self) -> Tensor:
        """Bound the error of each approximate solution u of the linear system (I − H)u = g.

        A bound is ‖e‖/(1 − h), with the residual e = g − (I − H)u and the upper bound h < 1 on the
        eigenvalues of H.

        Returns:
            Bounds on the distance to the exact solution, one per row.
        """
        norms: Tensor = torch.linalg.vector_norm(self.residual, dim=-1)
        return norms / self.convexity


def without_input(context: Context, rows: int) -> Context:
    """Return a context for this number of samples with zero input and bias."""

    def zeros(entry: Entry) -> Entry:
        if isinstance(entry, Tensor):
            return entry.new_zeros(rows, *entry.shape[1:])
        return tuple(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in entry)

    return Context(
        {name: zeros(entry) for name, entry in context.sample.items()},
        context.shared,
        {name: without_input(part, rows) for name, part in context.parts.items()},
    )
