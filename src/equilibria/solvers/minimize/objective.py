"""The hidden objective along a minimization: points, evaluations, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from equilibria.solvers.convergence import row_norms
from equilibria.solvers.linear.conjugate_gradients import weighted_run
from equilibria.solvers.problem import FixedPointProblem

SHORTEST = 1e-14
"""The length of a gradient step below which rounding hides what descent is left."""
FLAT_END = 1e-6
"""A slope σ′ below this, and above zero, is at an end of σ where a says little about y."""


@dataclass
class Point:
    """Pre-activations a, one row a problem, and what was computed at y = σ(a)."""

    a: Tensor
    y: Tensor
    descent: Tensor
    """d = −∇E(y)."""
    value: Tensor
    """G(y)."""
    size: Tensor
    """Of the terms of G: their absolute values."""

    @property
    def gap(self) -> Tensor:
        """Return d − a, minus the gradient of G: zero where y is stationary."""
        return self.descent - self.a

    def step_to(self, other: Point) -> tuple[Tensor, Tensor]:
        """The step Δy to another point, and the change of y − d along it."""
        step = other.y - self.y
        return step, step + self.descent - other.descent

    def keep(self, rows: Tensor) -> Point:
        return Point(*(getattr(self, f.name)[rows] for f in fields(self)))

    def with_rows(self, rows: Tensor, other: Point) -> Point:
        """The same, but `other` in these rows."""
        names = [f.name for f in fields(self)]
        return Point(
            *(getattr(self, name).index_copy(0, rows, getattr(other, name)) for name in names)
        )


class CountedObjective:
    """Evaluates the objective at points of the rows that still run, and counts evaluations."""

    def __init__(self, problem: FixedPointProblem, rows: Tensor) -> None:
        assert problem.potential is not None
        self.problem = problem
        self.potential = problem.potential
        self.activation = problem.potential.activation
        self.calls = self.sample_calls = 0
        """Evaluations and Hessian products so far; of the batch, and counted per sample."""
        self.spent = torch.zeros_like(rows)
        """The same for each row that still runs."""

    def keep(self, rows: Tensor) -> None:
        """Remove the rows that are not in `rows`."""
        self.problem, self.spent = self.problem.keep(rows), self.spent[rows]

    def evaluate(self, a: Tensor, rows: Tensor) -> Point:
        """G(σ(a)) = Σ aσ(a) − S(a) + E(σ(a)), and what goes with it."""
        y = self.activation(a)
        value, descent = self.energy(y, rows)
        separable = a * y - self.activation.primitive(a)
        size = separable.abs().sum(dim=1) + value.abs()
        value = separable.sum(dim=1) + value
        return Point(a, y, descent, torch.where(value.isnan(), torch.inf, value), size)

    def energy(self, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """E and −∇E at the states y of some rows."""
        self.calls += 1
        self.sample_calls += len(rows)
        self.spent[rows] += 1
        problem = self.problem if len(rows) == self.spent.shape[0] else self.problem.keep(rows)
        return self.potential.evaluate(problem, y)

    def prepared(self, y: Tensor, descent: Tensor) -> Point:
        """A point where G is not known; infinite where nothing is finite."""
        nothing = torch.zeros_like(y[:, 0])
        value = torch.full_like(nothing, torch.nan)
        value = value.masked_fill(~torch.isfinite(row_norms(descent)), torch.inf)
        point = Point(y, y, descent, value, nothing)
        point.a = self.argument(point)
        return point

    def argument(self, at: Point) -> Tensor:
        """An a with σ(a) = y, the one towards which G falls where there are several."""
        step = torch.full_like(at.value, SHORTEST)[:, None]
        return self.activation.prox_argument(at.y + step * (at.descent - at.y), step)

    def opened(self, at: Point) -> Point:
        """The same y, with units at a kink of σ put on the side towards which G falls."""
        flat = (self.activation.derivative(at.a) == 0) & (at.descent != at.a)
        return replace(at, a=torch.where(flat, self.argument(at), at.a))

    def distance(self, at: Point) -> Tensor:
        """‖σ(d) − y‖, which vanishes where y is stationary."""
        return row_norms(self.activation(at.descent) - at.y)

    def is_at_an_end(self, point: Point) -> Tensor:
        weight = self.activation.derivative(point.a)
        return ((weight > 0) & (weight < FLAT_END)).any(dim=1)

    def best(self, points: list[Point]) -> Point:
        """Of each row the point where G seems to be least, not at an end of σ.

        By the slopes of the smooth part at the ends of each way from the best so far. That of the
        far end counts more: where a gradient saturates, G has risen early.
        """
        best = points[0]
        ends = self.is_at_an_end(best)
        for point in points[1:]:
            way = point.y - best.y
            slopes = best.y - best.descent + 3 * (point.y - point.descent)
            change = torch.linalg.vecdot(slopes, way) / 4 + (
                self.activation.penalty(point.y) - self.activation.penalty(best.y)
            ).sum(dim=1)
            lower = (change <= 0) & ~self.is_at_an_end(point)
            rows = (lower | ends).nonzero().squeeze(1)
            best = best.with_rows(rows, point.keep(rows))
            ends = self.is_at_an_end(best)
        return best

    def newton_direction(self, at: Point, weight: Tensor, forcing: Tensor, limit: int) -> Tensor:
        """Return w with (I + ∇²E S) w = d − a; d − a itself where the curvature is not positive."""
        product = self.potential.hessian_product(self.problem, at.y)
        found = weighted_run(
            lambda v: v + product(weight * v),
            at.gap,
            weight,
            goal=forcing * (weight * at.gap.square()).sum(dim=1).sqrt(),
            limit=limit,
        )
        self.calls += found.evaluations
        self.sample_calls += int(found.iterations.sum())
        self.spent += found.iterations
        finite = torch.isfinite(found.correction).all(dim=1)[:, None]
        return torch.where(finite, found.correction, at.gap)
