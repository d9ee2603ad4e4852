"""Points of a minimization of the hidden objective, and counted evaluations."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from equilibria.solvers.convergence import row_norms
from equilibria.solvers.linear.conjugate_gradients import weighted_run
from equilibria.solvers.problem import FixedPointProblem

SHORTEST = 1e-14
"""Length of a gradient step below which rounding hides any further decrease."""
FLAT_SLOPE = 1e-6
"""Slope σ′ > 0 below which σ is saturated, so that a hardly depends on y."""


@dataclass
class Point:
    """Pre-activations a, one row per problem, and the quantities computed at y = σ(a)."""

    a: Tensor
    y: Tensor
    descent: Tensor
    """d = −∇E(y)."""
    value: Tensor
    """G(y)."""
    size: Tensor
    """Sum of the absolute values of the terms of G."""

    @property
    def gap(self) -> Tensor:
        """Negative gradient d − a of G; zero where y is stationary."""
        return self.descent - self.a

    def step_to(self, other: Point) -> tuple[Tensor, Tensor]:
        """Return the step Δy to another point, and the change of y − d along it."""
        step = other.y - self.y
        return step, step + self.descent - other.descent

    def keep(self, rows: Tensor) -> Point:
        return Point(*(getattr(self, f.name)[rows] for f in fields(self)))

    def with_rows(self, rows: Tensor, other: Point) -> Point:
        """Return a copy with the rows `rows` replaced by `other`."""
        names = [f.name for f in fields(self)]
        return Point(
            *(getattr(self, name).index_copy(0, rows, getattr(other, name)) for name in names)
        )


class CountedObjective:
    """Evaluates the objective at points of the running rows and counts evaluations."""

    def __init__(self, problem: FixedPointProblem, rows: Tensor) -> None:
        assert problem.potential is not None
        self.problem = problem
        self.potential = problem.potential
        self.activation = problem.potential.activation
        self.calls = self.sample_calls = 0
        """Number of evaluations and Hessian products: of the batch, and summed over samples."""
        self.spent = torch.zeros_like(rows)
        """Number of evaluations and Hessian products of each running row."""

    def keep(self, rows: Tensor) -> None:
        """Remove the rows that are not in `rows`."""
        self.problem, self.spent = self.problem.keep(rows), self.spent[rows]

    def evaluate(self, a: Tensor, rows: Tensor) -> Point:
        """Return the point at a, with G(σ(a)) = Σ aσ(a) − S(a) + E(σ(a))."""
        y = self.activation(a)
        value, descent = self.energy(y, rows)
        separable = a * y - self.activation.primitive(a)
        size = separable.abs().sum(dim=1) + value.abs()
        value = separable.sum(dim=1) + value
        return Point(a, y, descent, torch.where(value.isnan(), torch.inf, value), size)

    def energy(self, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return E and −∇E at the states y of some rows."""
        self.calls += 1
        self.sample_calls += len(rows)
        self.spent[rows] += 1
        problem = self.problem if len(rows) == self.spent.shape[0] else self.problem.keep(rows)
        return self.potential.evaluate(problem, y)

    def prepared(self, y: Tensor, descent: Tensor) -> Point:
        """Return a point with unknown G: NaN, or infinity where −∇E is not finite."""
        zero = torch.zeros_like(y[:, 0])
        value = torch.full_like(zero, torch.nan)
        value = value.masked_fill(~torch.isfinite(row_norms(descent)), torch.inf)
        point = Point(y, y, descent, value, zero)
        point.a = self.argument(point)
        return point

    def argument(self, at: Point) -> Tensor:
        """Return a with σ(a) = y; where a is not unique, the one towards which G falls."""
        step = torch.full_like(at.value, SHORTEST)[:, None]
        return self.activation.prox_argument(at.y + step * (at.descent - at.y), step)

    def opened(self, at: Point) -> Point:
        """Return the point with units at a kink of σ moved to the side towards which G falls."""
        flat = (self.activation.derivative(at.a) == 0) & (at.descent != at.a)
        return replace(at, a=torch.where(flat, self.argument(at), at.a))

    def distance(self, at: Point) -> Tensor:
        """Return ‖σ(d) − y‖, which is zero where y is stationary."""
        return row_norms(self.activation(at.descent) - at.y)

    def is_saturated(self, point: Point) -> Tensor:
        weight = self.activation.derivative(point.a)
        return ((weight > 0) & (weight < FLAT_SLOPE)).any(dim=1)

    def best(self, points: list[Point]) -> Point:
        """Return for each row the point with the smallest estimate of G and without saturation.

        The estimate uses the slopes of the smooth part at both ends of the path from the best point
        so far. The slope at the far end has a larger weight, because G rises early on a path along
        which the gradient saturates.
        """
        best = points[0]
        saturated = self.is_saturated(best)
        for point in points[1:]:
            path = point.y - best.y
            slopes = best.y - best.descent + 3 * (point.y - point.descent)
            change = torch.linalg.vecdot(slopes, path) / 4 + (
                self.activation.penalty(point.y) - self.activation.penalty(best.y)
            ).sum(dim=1)
            lower = (change <= 0) & ~self.is_saturated(point)
            rows = (lower | saturated).nonzero().squeeze(1)
            best = best.with_rows(rows, point.keep(rows))
            saturated = self.is_saturated(best)
        return best

    def newton_direction(self, at: Point, weight: Tensor, forcing: Tensor, limit: int) -> Tensor:
        """Return w with (I + ∇²E S) w = d − a, or d − a where the result is not finite.

        Args:
            at: Current point.
            weight: Diagonal of S.
            forcing: Relative residual to reach in each row.
            limit: Largest number of products.
        """
        product = self.potential.hessian_product(self.problem, at.y)
        result = weighted_run(
            lambda v: v + product(weight * v),
            at.gap,
            weight,
            goal=forcing * (weight * at.gap.square()).sum(dim=1).sqrt(),
            limit=limit,
        )
        self.calls += result.evaluations
        self.sample_calls += int(result.iterations.sum())
        self.spent += result.iterations
        finite = torch.isfinite(result.correction).all(dim=1)[:, None]
        return torch.where(finite, result.correction, at.gap)
