"""When a solve has converged, and when it has diverged: the one rule that all solvers share."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.registry import check_tolerances
from equilibria.solvers._cpu import is_cheap_to_read
from equilibria.solvers.solution import Solution, Status

if TYPE_CHECKING:
    from equilibria.solvers.problem import FixedPointProblem

DIVERGENCE_FACTOR = 1e6
"""A residual this many times larger than the first residuals and images has diverged."""

FIRST_ITERATIONS = 3
"""How many iterations set that scale: a normalized map brings a faint input to full size in two."""


PRECISION = 4
"""The finest tolerance, in units of the precision of the numbers."""

ROOM = 1e9
"""For growth up to divergence, and for the sum of the squares in a row."""


def finest_tolerance(dtype: torch.dtype) -> float:
    """Return the smallest tolerance that a solve in this type can be held to.

    Below it, rounding decides which samples reach the tolerance, and rounding depends on the size
    of the batch.
    """
    return PRECISION * torch.finfo(dtype).eps


def row_norms(rows: Tensor) -> Tensor:
    """The norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def row_units(*buffers: Tensor) -> Tensor | None:
    """About the largest number of each row, as a power of two; 1 where that is ordinary: (rows, 1).

    In these units no square of a row vanishes or overflows, nor of what a solve makes of it, which
    is 1e6 times larger at most, or smaller by as many digits as the numbers have. None where all
    rows are ordinary, which costs a norm to know.
    """
    norms = functools.reduce(torch.maximum, map(row_norms, buffers))
    if not norms.numel() or not buffers[0].shape[1]:
        return None
    info = torch.finfo(norms.dtype)
    low, high = ROOM * math.sqrt(info.tiny), math.sqrt(info.max) / ROOM
    smallest, largest_norm = torch.stack(torch.aminmax(norms)).tolist()
    if low < smallest and largest_norm < high:
        return None
    ordinary = (low < norms) & (norms < high)
    largest = torch.stack([buffer.abs().amax(dim=1) for buffer in buffers]).amax(dim=0)
    unit = torch.exp2(torch.log2(largest).floor()).clamp(info.tiny, info.max / 4)
    usual = ordinary | (largest == 0) | ~torch.isfinite(largest)
    return None if bool(usual.all()) else torch.where(usual, 1.0, unit)[:, None]


def row_rounding(unit: Tensor, size: int) -> Tensor:
    """The norm, in these units, of what a row of `size` numbers loses to rounding near zero.

    Below the smallest normal number digits are missing, however small the error of the arithmetic.
    """
    info = torch.finfo(unit.dtype)
    lost = math.sqrt(size) * info.tiny * info.eps / unit[:, 0]
    return torch.where(unit[:, 0] < 1, lost, 0.0)


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


class Residuals(NamedTuple):
    """How far the rows of an iterate y are from their images T(y), in the units of the problem."""

    absolute: Tensor
    """‖T(y) − y‖."""
    relative: Tensor
    """÷ ‖T(y)‖."""
    bounded: Tensor
    """False where a row is not finite, or has grown past all that was seen first."""


class Scale:
    """What the first iterate says of each row: where it has diverged, and what counts as zero."""

    def __init__(self, least: float = 0.0) -> None:
        self.least = least
        """A residual below this many times `DIVERGENCE_FACTOR` has not diverged."""
        self.limit: Tensor | None = None
        self.floor: Tensor | None = None
        self.measured = 0
        """How often `measure` was called."""

    def measure(self, image: Tensor, change: Tensor, rounding: Tensor | None) -> Residuals:
        """Return the residuals of T(y) and T(y) − y, which are known up to `rounding`."""
        absolute, size = row_norms(change), row_norms(image)
        if self.limit is None or self.floor is None:
            largest = torch.maximum(absolute, size)
            self.limit = DIVERGENCE_FACTOR * largest.clamp_min(self.least)
            # A fixed point at zero has no scale: rounding of what was seen first sets it.
            info = torch.finfo(image.dtype)
            self.floor = (info.eps * largest).clamp_min(info.tiny)
        # NaN compares false with everything: only finite, bounded rows pass.
        bounded = absolute <= self.limit
        if 0 < self.measured < FIRST_ITERATIONS and not _is_known_true(bounded):
            larger = DIVERGENCE_FACTOR * torch.maximum(absolute, size)
            self.limit = torch.where(larger > self.limit, larger, self.limit)
            self.limit = torch.where(torch.isfinite(larger), self.limit, -torch.inf)
            bounded = absolute <= self.limit
        self.measured += 1
        certain = absolute
        if rounding is not None:
            certain = torch.where(size > 0, torch.maximum(absolute, rounding), absolute)
        return Residuals(absolute, relative_residual(certain, size, self.floor), bounded)

    def keep(self, rows: Tensor) -> None:
        if self.limit is not None and self.floor is not None:
            self.limit, self.floor = self.limit[rows], self.floor[rows]


def _is_known_true(flags: Tensor) -> bool:
    """Whether all flags are true; False where reading them would stall the device."""
    return is_cheap_to_read(flags) and bool(flags.all())


@dataclass(frozen=True)
class Iterate:
    """What a stopping criterion may look at: the rows that are still in the batch."""

    problem: FixedPointProblem
    """Of these rows: `problem.unpack(image)` is their state, `problem.context` their context."""
    image: Tensor
    residuals: Residuals
    is_state: bool = True
    """Whether the image is the answer for a row that stops here; `Descent` may answer the point."""


class StoppingCriterion(ABC):
    """When a sample is done. The relative residual is one criterion; others know more.

    A criterion is a value without state; what it has to know of the samples it reads from the
    context of the problem, which shrinks with the batch.

    Examples:
        >>> class Large(eq.solvers.StoppingCriterion):  # content with ‖T(y)‖ > 1.4
        ...     def reached(self, iterate):
        ...         return iterate.image.norm(dim=1) > 1.4
        >>> solver = eq.Picard(stop=Large())
        >>> eq.fixed_point(lambda z, x: z / 2 + x, torch.ones(1, 1), solver=solver)
        tensor([[1.5000]])
    """

    @abstractmethod
    def reached(self, iterate: Iterate) -> Tensor:
        """For each row whether it may stop."""

    def notes(self) -> Mapping[str, Tensor]:
        """What it has to know of each sample of the batch, to be found in the context."""
        return {}


@dataclass(frozen=True)
class RelativeResidual(StoppingCriterion):
    """‖T(y) − y‖ ≤ tolerance · ‖T(y)‖.

    Examples:
        >>> rough = eq.Picard(stop=eq.solvers.RelativeResidual(0.5))
        >>> eq.fixed_point(lambda z, x: z / 2 + x, torch.ones(1, 1), solver=rough)
        tensor([[1.5000]])
    """

    tolerance: float

    def __post_init__(self) -> None:
        check_tolerances(tolerance=self.tolerance)

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
    tolerance = max(tolerance, finest_tolerance(problem.state_dtype))
    problem, before, mapped = problem.in_own_units(problem.pack(point), problem.pack(image))
    residuals = Scale().measure(mapped, mapped - before, problem.rounding)
    status = final_status(residuals.relative <= tolerance, torch.isfinite(residuals.absolute))
    return Solution(
        state=problem.unpack(mapped),
        status=status,
        residual=residuals.relative,
        absolute_residual=problem.in_numbers(residuals.absolute),
        iterations=torch.full_like(status, steps, dtype=torch.int64),
        evaluations=steps,
        sample_evaluations=steps * mapped.shape[0],
        tolerance=tolerance,
        solver=solver,
        epsilon=problem.epsilon,
        context=context,
        remedy=problem.remedy,
    )
