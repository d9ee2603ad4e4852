"""The resolvent X = (I − H)⁻¹ of a quadratic energy: linear solves with error bounds.

H = −∇²E ≼ h < 1 is the negative Hessian of the energy. For a mask P of units, X_P = (P − PHP)⁺.
The iterations need not be exact: every result has a residual, from which `Resolved` bounds what is
missing. `margins.py` says what X is needed for.
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
"""Tolerance of the linear solves; the residual that is left enters the bounds, squared."""


class Resolvent:
    """Solve linear systems with X or X_P, in float64.

    Args:
        energy: Quadratic energy.
        context: Context of the energy; only what depends on parameters counts.
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
        found = _searched(product, rows)
        return Resolved(rows, found, rows - product(found), self.convexity)

    def solve_masked(self, rows: Tensor, mask: Tensor, start: Tensor) -> Resolved:
        """Compute X_P g for every row g.

        The iterations run in float32, the residual is evaluated in float64: bounds of the result
        hold whatever the iterations found.

        Args:
            rows: The rows g, (rows, units).
            mask: P, one row of zeros and ones for each g.
            start: A guess of the solutions.

        Returns:
            The solutions with their residuals, in the type of `rows`.
        """
        given = rows * mask
        product = self._product(self.energy, self.context, len(rows), mask)
        rough = self._product(*self._in_single, len(rows), mask.float())
        found = _searched(rough, given.float(), (start * mask).float()).to(given)
        return Resolved(given, found, given - product(found), self.convexity)

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
            kept = v if mask is None else v * mask
            image = packing.pack(energy.descent(packing.unpack(kept), context))
            return v - (image if mask is None else image * mask)

        return product


def _searched(product: LinearMap, rows: Tensor, start: Tensor | None = None) -> Tensor:
    found = conjugate_gradients(
        product, rows, start=start, tolerance=RESOLVENT_TOLERANCE, max_iterations=200
    )
    return found.value


@dataclass(frozen=True)
class Resolved:
    """Solutions u ≈ Xg with the residuals e = g − X⁻¹u, for rows g."""

    rows: Tensor
    solution: Tensor
    residual: Tensor
    convexity: float

    def difference(self, one: Tensor, others: Tensor) -> Resolved:
        """Return the solutions for the rows g_i − g_j, i in `one` and j in `others`."""

        def between(of: Tensor) -> Tensor:
            return of[one] - of[others]

        return Resolved(
            between(self.rows), between(self.solution), between(self.residual), self.convexity
        )

    def form(self) -> tuple[Tensor, Tensor]:
        """Bound gᵀXg from below and above: uᵀ(g + e), and at most eᵀXe ≤ ‖e‖²/(1 − h) more."""
        low = (self.solution * (self.rows + self.residual)).sum(dim=-1).clamp_min(0)
        return low, low + self.residual.square().sum(dim=-1) / self.convexity

    def error(self) -> Tensor:
        """Bound ‖u − Xg‖ from above."""
        norms: Tensor = torch.linalg.vector_norm(self.residual, dim=-1)
        return norms / self.convexity


def without_input(context: Context, rows: int) -> Context:
    """Return the context of this number of samples whose input and bias are zero."""

    def zeros(entry: Entry) -> Entry:
        if isinstance(entry, Tensor):
            return entry.new_zeros(rows, *entry.shape[1:])
        return tuple(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in entry)

    return Context(
        {name: zeros(entry) for name, entry in context.sample.items()},
        context.shared,
        {name: without_input(part, rows) for name, part in context.parts.items()},
    )
