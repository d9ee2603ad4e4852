"""What is certain of an equilibrium before it is reached: bounds of margins, and an early exit.

An equilibrium y = σ(Hy + c) with H = −∇²E ≼ h < 1 and 0 ≤ σ′ ≤ 1 moves with c by
dy = X_D dc, where D = σ′ and

    X_D = D^½(I − D^½HD^½)⁻¹D^½ = (D⁻¹ − H)⁻¹,    0 ≼ X_D ≼ X_P for all D ≤ P,

because (D⁻¹ − H)⁻¹ grows with D. Hence |gᵀX_D c| ≤ √(gᵀX_P g)·√(cᵀX_P c) for any g, with
cᵀX_P c ≤ ‖c‖²/(1 − h); and between two diagonal matrices O ≤ D ≤ P, with M = ½(X_O + X_P),

    |gᵀX_D c| ≤ |gᵀM c| + ½√(gᵀ(X_P − X_O)g)·√(cᵀ(X_P − X_O)c),

because X_D − M lies between ∓½(X_P − X_O). The equilibrium is Lipschitz in c, hence differentiable
almost everywhere along a segment, and these are bounds for its whole length.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.context import Context, Entry, Layout, Packing, State, state_tensors, twin
from equilibria.energies import Energy, Rounding
from equilibria.operators.rounding import accumulated, unit_roundoff
from equilibria.solvers import (
    Descent,
    Iterate,
    Solution,
    StoppingCriterion,
    conjugate_gradients,
)
from equilibria.solvers.linear import LinearMap

RESOLVENT_TOLERANCE = 1e-4
"""Of the linear solves: what is left enters the bounds, squared."""
READING = 4
"""Times the numbers of a state: roundings in a logit that is read off it."""
COARSE = 1e-3
"""The relative error of a sum over a state above which sums are taken in float64."""
FEATURE, FEATURE_ERROR = "feature size", "feature error"


class Resolvent:
    """X_P = (P − PHP)⁺ of a quadratic energy, P a mask of units: solves, and how exact they are."""

    def __init__(self, energy: Energy, context: Context, layout: Layout, concavity: float) -> None:
        if not energy.facts.is_quadratic:
            raise ValueError(f"{energy} is not quadratic: its curvature depends on the state")
        self.energy = energy
        self.context = context
        self.packing = Packing(layout, len(layout) == 1, 0, channels_last=(False,) * len(layout))
        self.convexity = 1 - concavity

    def solve(self, rows: Tensor) -> Resolved:
        """X g for every row g."""
        product = self._product(self.energy, self.context, len(rows))
        found = _searched(product, rows)
        return Resolved(rows, found, rows - product(found), self.convexity)

    def solve_masked(self, rows: Tensor, mask: Tensor, start: Tensor) -> Resolved:
        """X_P g for every row g.

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
        """v ↦ v − PHPv on so many rows."""
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
    """u ≈ Xg with the residual e = g − X⁻¹u, for rows g."""

    rows: Tensor
    solution: Tensor
    residual: Tensor
    convexity: float

    def difference(self, one: Tensor, others: Tensor) -> Resolved:
        """For the rows g_i − g_j, i in `one` and j in `others`, which are solved with them."""

        def between(of: Tensor) -> Tensor:
            return of[one] - of[others]

        return Resolved(
            between(self.rows), between(self.solution), between(self.residual), self.convexity
        )

    def form(self) -> tuple[Tensor, Tensor]:
        """gᵀXg from below and above: uᵀ(g + e), and eᵀXe ≤ ‖e‖²/(1 − h) more."""
        low = (self.solution * (self.rows + self.residual)).sum(dim=-1).clamp_min(0)
        return low, low + self.residual.square().sum(dim=-1) / self.convexity

    def error(self) -> Tensor:
        """‖u − Xg‖."""
        norms: Tensor = torch.linalg.vector_norm(self.residual, dim=-1)
        return norms / self.convexity


def without_input(context: Context, rows: int) -> Context:
    """The context of so many samples whose input is zero, b included."""

    def zeros(entry: Entry) -> Entry:
        if isinstance(entry, Tensor):
            return entry.new_zeros(rows, *entry.shape[1:])
        return tuple(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in entry)

    return Context(
        {name: zeros(entry) for name, entry in context.sample.items()},
        context.shared,
        {name: without_input(part, rows) for name, part in context.parts.items()},
    )


@dataclass(frozen=True, eq=False)
class CertifiedClass(StoppingCriterion):
    """A sample stops as soon as its class is certain, or at the tolerance.

    With r = ‖T(y) − y‖ and δ a bound of the rounding of T, the margin w_k − w_j at the computed
    image differs from that at the exact equilibrium by at most slope_kj·r + blur_kj·δ.
    A class is certain where every margin is larger.

    readout, offset: logits = ⟨readout, y⟩ + offset; the readout has a row a class, in float64.
    slope, blur: of a margin in the residual and in δ. direction: ‖readout_k − readout_j‖.
    rounding: of the map, in the type it computes in, whose unit roundoff is `unit`.
    feature, feature_error: of each sample the size of the layer's input, and its own rounding.
    """

    tolerance: float
    readout: State
    offset: Tensor
    slope: Tensor
    blur: Tensor
    direction: Tensor
    rounding: Rounding
    unit: float
    feature: Tensor
    feature_error: Tensor

    def notes(self) -> dict[str, Tensor]:
        return {FEATURE: self.feature, FEATURE_ERROR: self.feature_error}

    def reached(self, iterate: Iterate) -> Tensor:
        problem, residuals = iterate.problem, iterate.residuals
        is_close = residuals.relative <= self.tolerance
        is_rougher = problem.epsilon > 2 * self.unit  # under autocast
        is_known = iterate.is_state and FEATURE in problem.context.sample
        if problem.couples_batch or is_rougher or not is_known:
            return is_close
        image = iterate.image if problem.unit is None else iterate.image * problem.unit
        absolute = problem.in_numbers(residuals.absolute)
        return is_close | self._certain(image, absolute, problem.packing, problem.context)

    def holds(self, solution: Solution) -> Tensor:
        """For which samples the class at the state of a solution is certain."""
        if FEATURE not in solution.context.sample or Descent.__name__ in solution.solver:
            return torch.zeros_like(solution.converged)
        packing = Packing.of(solution.state)
        rows = packing.pack(solution.state)
        return self._certain(rows, solution.absolute_residual, packing, solution.context)

    def _certain(
        self, image: Tensor, absolute: Tensor, packing: Packing, context: Context
    ) -> Tensor:
        numbers = image.shape[1]
        summed = accumulated(2 * numbers + 8, self.unit)
        # Norms are taken in the type of the map, logits in float64 where that would be too coarse.
        image = image if summed < COARSE else image.double()
        reading = 2 * accumulated(READING * numbers, unit_roundoff(image.dtype))
        logits = (image @ packing.pack(self.readout).to(image).T).double() + self.offset
        best = logits.argmax(dim=1)
        margins = logits.gather(1, best[:, None]) - logits
        residual = absolute.double() * (1 + summed)
        size = torch.linalg.vector_norm(image, dim=1).double() * (1 + summed)
        sizes = (size + residual, context[FEATURE], context[FEATURE_ERROR])
        delta = self.rounding.at(context, *sizes) * (1 + 4 * summed)
        error = self.slope[best] * residual[:, None] + self.blur[best] * delta[:, None]
        read = reading * (self.direction[best] * size[:, None] + logits.abs())
        certain: Tensor = margins > (error + read) * (1 + 1e-6)
        return certain.scatter(1, best[:, None], True).all(dim=1)


def flat_rows(state: State) -> Tensor:
    """A state of several rows as a matrix, in the plain order of its numbers."""
    return torch.cat([tensor.flatten(1) for tensor in state_tensors(state)], dim=1)
