"""When a solve has converged, and when it has diverged: the one rule that all solvers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status

DIVERGENCE_FACTOR = 1e6
"""A residual this many times larger than the first residual and the first image has diverged."""


def row_norms(rows: Tensor) -> Tensor:
    """The norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def relative_residual(absolute: Tensor, size: Tensor, floor: Tensor | None = None) -> Tensor:
    """‖T(y) − y‖ ÷ ‖T(y)‖, or ‖g − Au‖ ÷ ‖g‖; zero where the residual vanishes.

    floor: the smallest size to divide by. A fixed point at zero has no scale of its own.
    """
    if floor is not None:
        return absolute / torch.maximum(size, floor)
    return torch.where(absolute > 0, absolute / size, absolute)


def final_status(converged: Tensor, finite: Tensor) -> Tensor:
    """The status of problems that have stopped: what is not finite has diverged."""
    status = torch.where(converged, int(Status.CONVERGED), int(Status.OUT_OF_ITERATIONS))
    return torch.where(finite, status, int(Status.DIVERGED)).to(torch.int8)


@dataclass(frozen=True)
class Residuals:
    """How far the rows of an iterate y are from their images T(y)."""

    absolute: Tensor
    """‖T(y) − y‖."""
    relative: Tensor
    """÷ ‖T(y)‖."""
    bounded: Tensor
    """False where a row is not finite, or has grown past all that was seen first."""


class Scale:
    """What the first iterate says of each row: where it has diverged, and what counts as zero."""

    def __init__(self) -> None:
        self.limit: Tensor | None = None
        self.floor: Tensor | None = None

    def measure(self, image: Tensor, change: Tensor) -> Residuals:
        """The residuals of T(y) and T(y) − y."""
        absolute, size = row_norms(change), row_norms(image)
        if self.limit is None or self.floor is None:
            largest = torch.maximum(absolute, size)
            self.limit = DIVERGENCE_FACTOR * largest
            # A fixed point at zero has no scale: rounding of what was seen first sets it.
            info = torch.finfo(image.dtype)
            self.floor = (info.eps * largest).clamp_min(info.tiny)
        # NaN compares false with everything: only finite, bounded rows pass.
        return Residuals(
            absolute, relative_residual(absolute, size, self.floor), absolute <= self.limit
        )

    def keep(self, rows: Tensor) -> None:
        if self.limit is not None and self.floor is not None:
            self.limit, self.floor = self.limit[rows], self.floor[rows]


@dataclass(frozen=True)
class Iterate:
    """What a stopping criterion may look at: the rows that are still in the batch."""

    problem: FixedPointProblem
    """Of these rows: `problem.unpack(image)` is their state, `problem.context` their context."""
    image: Tensor
    residuals: Residuals


class StoppingCriterion(ABC):
    """When a sample is done. The relative residual is one criterion; others know more.

    A criterion is a value without state; what it has to know of the samples it reads from the
    context of the problem, which shrinks with the batch.
    """

    @abstractmethod
    def reached(self, iterate: Iterate) -> Tensor:
        """For each row whether it may stop."""


@dataclass(frozen=True)
class RelativeResidual(StoppingCriterion):
    """‖T(y) − y‖ ≤ tolerance · ‖T(y)‖."""

    tolerance: float

    def reached(self, iterate: Iterate) -> Tensor:
        return iterate.residuals.relative <= self.tolerance


@torch.no_grad()
def solution_of_last_iterate(
    problem: FixedPointProblem,
    context: Context,
    point: State,
    image: State,
    *,
    steps: int,
    tolerance: float,
    solver: str,
) -> Solution:
    """How far the last iterate `point` is from its image T(point), which is the state."""
    mapped = problem.pack(image)
    absolute = row_norms(mapped - problem.pack(point))
    relative = relative_residual(absolute, row_norms(mapped))
    status = final_status(relative <= tolerance, torch.isfinite(absolute))
    return Solution(
        state=problem.unpack(mapped),
        status=status,
        residual=relative,
        absolute_residual=absolute,
        iterations=torch.full_like(status, steps, dtype=torch.int64),
        evaluations=steps,
        sample_evaluations=steps * mapped.shape[0],
        tolerance=tolerance,
        solver=solver,
        epsilon=problem.epsilon,
        context=context,
        remedy=problem.remedy,
    )
