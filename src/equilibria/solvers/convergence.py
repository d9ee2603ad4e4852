"""Convergence and divergence tests that all solvers share."""

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
"""A solve has diverged if its residual exceeds this multiple of its first residuals and images."""

FIRST_ITERATIONS = 3
"""Number of iterations that set this scale. A map with normalization brings a small input to full
size within two."""


MIN_TOLERANCE_EPSILONS = 4
"""Smallest tolerance, in units of the machine epsilon."""

OVERFLOW_MARGIN = 1e9
"""Factor kept free below overflow and above underflow of squared norms: for growth up to the
divergence limit, and for summing the squares of a row."""


def finest_tolerance(dtype: torch.dtype) -> float:
    """Return the smallest tolerance of solves in this type.

    Below it, rounding decides which samples reach the tolerance, and rounding depends on the size
    of the batch.
    """
    return MIN_TOLERANCE_EPSILONS * torch.finfo(dtype).eps


def row_norms(rows: Tensor) -> Tensor:
    """Return the norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def row_units(*buffers: Tensor) -> Tensor | None:
    """Return units that avoid overflow and underflow when a row is squared, shape (rows, 1).

    The unit of a row is about its largest number, as a power of two, or 1 if the norm of the row is
    neither extremely small nor extremely large. The margin covers iterates that grow by a factor of
    1e6, and differences as small as the machine epsilon.

    Returns:
        The units, or None if all are 1.
    """
    norms = functools.reduce(torch.maximum, map(row_norms, buffers))
    if not norms.numel() or not buffers[0].shape[1]:
        return None
    info = torch.finfo(norms.dtype)
    low, high = OVERFLOW_MARGIN * math.sqrt(info.tiny), math.sqrt(info.max) / OVERFLOW_MARGIN
    smallest, largest_norm = torch.stack(torch.aminmax(norms)).tolist()
    if low < smallest and largest_norm < high:
        return None
    ordinary = (low < norms) & (norms < high)
    largest = torch.stack([buffer.abs().amax(dim=1) for buffer in buffers]).amax(dim=0)
    unit = torch.exp2(torch.log2(largest).floor()).clamp(info.tiny, info.max / 4)
    usual = ordinary | (largest == 0) | ~torch.isfinite(largest)
    return None if bool(usual.all()) else torch.where(usual, 1.0, unit)[:, None]


def row_rounding(unit: Tensor, size: int) -> Tensor:
    """Return the norm, in these units, of the error that subnormal numbers add to a row.

    Below the smallest normal number of the type, numbers have fewer digits.

    Args:
        unit: Unit of each row, shape (rows, 1).
        size: Number of entries of a row.
    """
    info = torch.finfo(unit.dtype)
    lost = math.sqrt(size) * info.tiny * info.eps / unit[:, 0]
    return torch.where(unit[:, 0] < 1, lost, 0.0)


def relative_residual(absolute: Tensor, size: Tensor, floor: Tensor | None = None) -> Tensor:
    """Return ‖T(y) − y‖ / ‖T(y)‖, or ‖g − Au‖ / ‖g‖; zero where the residual is zero.

    Args:
        absolute: Absolute residual of each row.
        size: Norm that residuals are relative to.
        floor: Smallest size to divide by, for fixed points at zero.
    """
    if floor is not None:
        return absolute / torch.maximum(size, floor)
    return torch.where(absolute > 0, absolute / size, absolute)


def final_status(converged: Tensor, finite: Tensor) -> Tensor:
    """Return the status of problems that have stopped; those that are not finite have diverged."""
    status = torch.where(converged, int(Status.CONVERGED), int(Status.OUT_OF_ITERATIONS))
    return torch.where(finite, status, int(Status.DIVERGED)).to(torch.int8)


class Residuals(NamedTuple):
    """Residuals of the rows of an iterate y, in the units of the problem."""

    absolute: Tensor
    """‖T(y) − y‖."""
    relative: Tensor
    """‖T(y) − y‖ / ‖T(y)‖."""
    bounded: Tensor
    """False where a row is not finite or exceeds the divergence limit."""


class Scale:
    """Scale of each row, set by its first iterates: divergence limit and smallest divisor."""

    def __init__(self, least: float = 0.0) -> None:
        self.least = least
        """A residual below this many times `DIVERGENCE_FACTOR` has not diverged."""
        self.limit: Tensor | None = None
        self.floor: Tensor | None = None
        self.measured = 0
        """Number of calls of `measure`."""

    def measure(self, image: Tensor, change: Tensor, rounding: Tensor | None) -> Residuals:
        """Return the residuals of one iteration.

        Args:
            image: T(y).
            change: T(y) − y.
            rounding: Rounding error of the residuals; None if it is negligible.
        """
        absolute, size = row_norms(change), row_norms(image)
        if self.limit is None or self.floor is None:
            largest = torch.maximum(absolute, size)
            self.limit = DIVERGENCE_FACTOR * largest.clamp_min(self.least)
            # A fixed point at zero has no scale: the rounding error of the first iterate sets it.
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
    """Return whether all flags are true; False if reading them would stall the device."""
    return is_cheap_to_read(flags) and bool(flags.all())


@dataclass(frozen=True)
class Iterate:
    """Input of a stopping criterion: one iteration of the rows that are still in the batch.

    Attributes:
        problem: Problem of these rows: `problem.unpack(image)` is their state, `problem.context`
            the tensors that the map reads besides it.
        image: T(y) for the last point y, shape (rows, size).
        residuals: Residuals of each row.
        is_state: Whether `image` is the result of a row that stops here; `Descent` may return y
            instead.
    """

    problem: FixedPointProblem
    image: Tensor
    residuals: Residuals
    is_state: bool = True


class StoppingCriterion(ABC):
    """Base class of stopping criteria, which decide when a sample has converged.

    A criterion stores nothing between iterations. It reads per-sample data from `problem.context`,
    from which finished samples are removed; see `notes`.

    Examples:
        >>> class Large(eq.solvers.StoppingCriterion):  # stops at ‖T(y)‖ > 1.4
        ...     def reached(self, iterate):
        ...         return iterate.image.norm(dim=1) > 1.4
        >>> solver = eq.Picard(stop=Large())
        >>> eq.fixed_point(lambda z, x: z / 2 + x, torch.ones(1, 1), solver=solver)
        tensor([[1.5000]])
    """

    @abstractmethod
    def reached(self, iterate: Iterate) -> Tensor:
        """Return whether each row may stop, shape (rows,).

        Args:
            iterate: Current iteration of the rows in the batch.
        """

    def notes(self) -> Mapping[str, Tensor]:
        """Return per-sample tensors that `reached` needs, by name.

        They are added to `problem.context`, so that `reached` gets those of the rows in the batch.
        """
        return {}


@dataclass(frozen=True)
class RelativeResidual(StoppingCriterion):
    """Stop at ‖T(y) − y‖ ≤ tolerance · ‖T(y)‖.

    Args:
        tolerance: Largest relative residual.

    Examples:
        >>> solver = eq.Picard(stop=eq.solvers.RelativeResidual(0.5))
        >>> eq.fixed_point(lambda z, x: z / 2 + x, torch.ones(1, 1), solver=solver)
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
    """Return a solution whose state is T(point), with the residual at `point`."""
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
