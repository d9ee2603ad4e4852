"""Per-row bookkeeping of a solve: which rows still run, and the best image of each row.

A solver works on a `(problems, size)` buffer with one row per problem (`base.py`). `Rows` keeps
tensors with one entry per row. `OneRow` keeps Python numbers; it serves a single problem (one
sample, or a batch that is coupled to one problem) whose numbers are cheap to read. Both offer
`observe`, `give_up_slow`, `drop_finished` and `results`, and the attributes `running_count`,
`latest` and `best`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.solvers._cpu import is_cheap_to_read
from equilibria.solvers.convergence import (
    DIVERGENCE_FACTOR,
    FIRST_ITERATIONS,
    Iterate,
    RelativeResidual,
    Residuals,
    Scale,
    StoppingCriterion,
    row_norms,
)
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Status, Trace

MIN_RESIDUAL_REDUCTION = 0.9
"""A residual above this share of its earlier value has stopped falling."""
MAX_SPEED_UP = 2.0
"""Largest factor by which the convergence rate is expected to improve later in the solve."""


def track(
    problem: FixedPointProblem,
    start: Tensor,
    criterion: StoppingCriterion,
    warm_up: int,
    *,
    keeps_last: bool = False,
) -> Rows | OneRow:
    """Return the bookkeeping that suits a problem.

    Args:
        problem: The problem, in its own units.
        start: Buffer of the start, shape (problems, size).
        criterion: Decides when a row has converged.
        warm_up: Number of iterations that were run before.
        keeps_last: Whether the answer is the last image instead of that with the smallest residual.
    """
    is_single = start.shape[0] == 1 and problem.unit is None and is_cheap_to_read(start)
    if is_single and type(criterion) is RelativeResidual:
        return OneRow(start, criterion.tolerance, warm_up, keeps_last=keeps_last)
    return Rows(start, criterion, warm_up, keeps_last=keeps_last)


@dataclass
class Answers:
    """The answer for each row: T(y) for its best or last point y, with the residual at y."""

    best: Tensor
    residual: Tensor
    absolute: Tensor
    status: Tensor
    iterations: Tensor

    def take(
        self, image: Tensor, residuals: Residuals, improved: Tensor, *, is_cheap: bool
    ) -> None:
        """Replace the answers of the rows that have improved; copy nothing if all have.

        Args:
            image: T(y) of every row.
            residuals: Residuals of every row.
            improved: Which rows have improved.
            is_cheap: Whether the host may read `improved`.
        """
        if is_cheap and bool(improved.all()):
            self.best, self.residual, self.absolute = image, residuals.relative, residuals.absolute
            return
        self.best = torch.where(improved[:, None], image, self.best)
        self.residual = torch.where(improved, residuals.relative, self.residual)
        self.absolute = torch.where(improved, residuals.absolute, self.absolute)

    def keep(self, rows: Tensor) -> Answers:
        return Answers(*(getattr(self, f.name)[rows] for f in fields(self)))

    def empty_like(self) -> Answers:
        return Answers(*(torch.empty_like(getattr(self, f.name)) for f in fields(self)))

    def store(self, answers: Answers, at: Tensor) -> None:
        for f in fields(self):
            getattr(self, f.name)[at] = getattr(answers, f.name)


class Rows:
    """Bookkeeping of a batch.

    Finished rows stay in the batch until `drop_finished` removes them. The answers of removed rows
    are kept in tensors of full size; `index` maps the remaining rows to their problems.
    """

    def __init__(
        self,
        start: Tensor,
        criterion: StoppingCriterion,
        warm_up: int,
        *,
        keeps_last: bool = False,
    ) -> None:
        self.keeps_last = keeps_last
        self.problems = self.in_batch = start.shape[0]
        """Number of problems, and of rows that are still in the batch."""
        self.criterion = criterion
        self.scale = Scale()
        infinite = start.new_full((self.problems,), torch.inf)
        self.answers = Answers(
            best=start,
            residual=infinite,
            absolute=infinite,
            status=torch.full_like(infinite, Status.OUT_OF_ITERATIONS, dtype=torch.int8),
            iterations=torch.full_like(infinite, warm_up, dtype=torch.int64),
        )
        self.iteration = warm_up
        self.running = torch.ones_like(infinite, dtype=torch.bool)
        self.running_count = self.problems
        """Number of running rows when the host last read it."""
        self.is_count_current = True
        """False if rows may have finished since then."""
        self.residuals = Residuals(infinite, infinite, self.running)
        """Residuals of the last iteration."""
        self.observed = self.running
        """The rows that were running in the last iteration."""
        self.mark: Tensor | None = None
        """Best residuals at the last call of `give_up_slow`; before it, those of iteration 1."""
        self.index: Tensor | None = None
        self.dropped: Answers | None = None
        self.is_cheap = is_cheap_to_read(start)
        self.tolerance: Tensor | None = None
        """Tolerance of a `RelativeResidual`; a tensor, because that is compared faster."""
        if type(criterion) is RelativeResidual:
            self.tolerance = start.new_full((), criterion.tolerance)

    @property
    def best(self) -> Tensor:
        return self.answers.best

    @property
    def latest(self) -> Tensor:
        """Relative residuals of the last iteration for all problems; NaN where it did not run."""
        shown = torch.where(self.observed, self.residuals.relative, torch.nan)
        if self.index is None:
            return shown
        return shown.new_full((self.problems,), torch.nan).index_copy(0, self.index, shown)

    def observe(
        self,
        problem: FixedPointProblem,
        image: Tensor,
        change: Tensor,
        *,
        must_fall: bool,
        read: bool,
    ) -> None:
        """Process one iteration: update the answers and finish rows.

        The absolute residual is ‖T(y) − y‖, the relative one ‖T(y) − y‖/max(‖T(y)‖, floor) with
        floor = ε·max(‖T(y₁)‖, ‖T(y₁) − y₁‖), y₁ the first point and ε the machine epsilon. A row
        is bounded if its absolute residual is at most 10⁶ times the largest residual or image of
        its first three iterations (`Scale.measure`).

        - A bounded row that reached its goal ends as CONVERGED: its relative residual is at most
          the tolerance, or the stopping criterion is met.
        - A row that is not bounded ends as DIVERGED.
        - With `must_fall`, a row whose absolute residual did not fall ends as OUT_OF_ITERATIONS.

        The answer of a running, bounded row is replaced if its relative residual is the smallest so
        far, or if a stopping criterion other than `RelativeResidual` says that it may stop. With
        `keeps_last` it is always replaced.

        Args:
            problem: The problem of the rows in the batch.
            image: T(y) of every row.
            change: T(y) − y of every row.
            must_fall: Whether to finish the rows whose absolute residual did not fall.
            read: Whether to read the number of running rows, which synchronizes with a GPU.
        """
        residuals = self.scale.measure(image, change, problem.rounding)
        absolute, relative, bounded = residuals
        if self.tolerance is None:
            reached = self.criterion.reached(Iterate(problem, image, residuals))
            # A stopping criterion overrides the comparison with the best residual.
            improved = (relative < self.answers.residual) | reached
        else:
            reached = relative <= self.tolerance
            improved = relative < self.answers.residual
        improved = bounded.clone() if self.keeps_last else improved & bounded
        going = bounded > reached  # bounded and not reached
        if must_fall:
            going &= absolute < self.residuals.absolute
        if self.running_count < self.in_batch or not self.is_count_current:
            going &= self.running
            improved &= self.running
        self.iteration += 1
        self.residuals, self.observed = residuals, self.running
        if self.mark is None:
            self.mark = relative
        if not (self.is_cheap and torch.equal(going, self.running)):
            ended = self.running & ~going
            self._end(ended)
            # Without `must_fall`, a row ends by divergence or at its goal; the second line corrects
            # the status of the latter. A row that merely did not fall stays OUT_OF_ITERATIONS.
            self._set_status(ended & ~bounded if must_fall else ended, Status.DIVERGED)
            self._set_status(ended & bounded & reached, Status.CONVERGED)
            self.running, self.is_count_current = going, False
        self.answers.take(image, residuals, improved, is_cheap=self.is_cheap)
        if read and not self.is_count_current:
            self._count()

    def _end(self, rows: Tensor) -> None:
        """Store the number of iterations of the rows that end in this one."""
        iterations = self.answers.iterations
        self.answers.iterations = iterations.masked_fill(rows, self.iteration)

    def _set_status(self, rows: Tensor, status: Status) -> None:
        self.answers.status = self.answers.status.masked_fill(rows, int(status))

    def _count(self) -> None:
        self.running_count, self.is_count_current = int(self.running.sum()), True

    def give_up_slow(self, tolerance: float, periods: float) -> None:
        """Finish the rows whose best residual r has fallen too little since the last call.

        A row goes on if r ≤ r_last·min(0.9, (tolerance/r)^{1/(2·periods)}). The status of the other
        rows remains OUT_OF_ITERATIONS.

        Args:
            tolerance: Relative residual to reach.
            periods: Number of iterations left, in units of those since the last call.
        """
        residual = self.answers.residual
        pace = (tolerance / residual).pow(1 / (MAX_SPEED_UP * periods))
        pace = pace.clamp_max(MIN_RESIDUAL_REDUCTION)
        before = residual if self.mark is None else self.mark
        slow = self.running & ~(residual <= pace * before)
        self.mark = residual
        self._end(slow)
        self.running = self.running & ~slow
        self._count()

    def drop_finished(self, share: float) -> Tensor | None:
        """Remove finished rows from the batch if they are at least this share of it.

        Returns:
            Indices of the rows that remain, or None if nothing was removed.
        """
        finished = self.in_batch - self.running_count
        if not finished or finished < share * self.in_batch:
            return None
        if self.dropped is None or self.index is None:
            self.dropped = self.answers.empty_like()
            self.index = torch.arange(self.problems, device=self.running.device)
        done, rows = (mask.nonzero().squeeze(1) for mask in (~self.running, self.running))
        self.dropped.store(self.answers.keep(done), self.index[done])
        self.answers = self.answers.keep(rows)
        self.index = self.index[rows]
        self.in_batch = rows.shape[0]
        self.running = self.observed = self.running[rows]
        self.residuals = Residuals(*(values[rows] for values in self.residuals))
        self.mark = None if self.mark is None else self.mark[rows]
        self.scale.keep(rows)
        return rows

    def results(self) -> Answers:
        """Return the answers of all problems."""
        self._end(self.running)
        if self.dropped is None or self.index is None:
            return self.answers
        self.dropped.store(self.answers, self.index)
        return self.dropped


class OneRow:
    """Best state, residuals and status of a single problem during a solve, as Python numbers.

    The rules for convergence, stalling and divergence are those of `Rows`, which tracks a batch.
    """

    def __init__(
        self, start: Tensor, tolerance: float, warm_up: int, *, keeps_last: bool = False
    ) -> None:
        self.keeps_last = keeps_last
        self.best = start
        self.tolerance = tolerance
        self.iteration = warm_up
        self.precision = torch.finfo(start.dtype)
        self.limit = 0.0
        """Absolute residual above which the solve has diverged."""
        self.floor = 0.0
        """Smallest size to divide by in the relative residual."""
        self.measured = 0
        self.residual = self.absolute = math.inf
        """Relative and absolute residual of the best image."""
        self.last_absolute = math.inf
        self.last_relative = math.nan
        self.mark = math.inf
        self.status = Status.OUT_OF_ITERATIONS
        self.is_running = True
        self.running_count = 1

    @property
    def latest(self) -> Tensor:
        return self.best.new_tensor([self.last_relative])

    def observe(
        self,
        problem: FixedPointProblem,
        image: Tensor,
        change: Tensor,
        *,
        must_fall: bool,
        read: bool,
    ) -> None:
        """Process one iteration; see `Rows.observe`."""
        if self.is_running:
            self._observe(image, change, must_fall)
        else:
            self.last_relative = math.nan
        if read:
            self.running_count = int(self.is_running)

    def _observe(self, image: Tensor, change: Tensor, must_fall: bool) -> None:
        absolute, size = float(row_norms(change)), float(row_norms(image))
        is_bounded = self._is_bounded(absolute, size)
        relative = absolute / max(size, self.floor)
        self.iteration += 1
        is_reached = is_bounded and relative <= self.tolerance
        has_risen = must_fall and not absolute < self.last_absolute
        self.last_absolute, self.last_relative = absolute, relative
        if is_reached or (is_bounded and (self.keeps_last or relative < self.residual)):
            self.best, self.residual, self.absolute = image, relative, absolute
        if is_reached:
            self.status = Status.CONVERGED
        elif not is_bounded:
            self.status = Status.DIVERGED
        if is_reached or not is_bounded or has_risen:
            self.is_running = False

    def _is_bounded(self, absolute: float, size: float) -> bool:
        """Whether the iteration is finite and has not diverged; see `Scale.measure`."""
        largest = DIVERGENCE_FACTOR * max(absolute, size)
        if self.measured == 0:
            self.limit = largest
            self.floor = max(self.precision.eps * max(absolute, size), self.precision.tiny)
            self.mark = absolute / max(size, self.floor)
        elif self.measured < FIRST_ITERATIONS and not absolute <= self.limit:
            self.limit = max(self.limit, largest) if math.isfinite(largest) else -math.inf
        self.measured += 1
        return absolute <= self.limit

    def give_up_slow(self, tolerance: float, periods: float) -> None:
        """Finish the solve if its best residual has fallen too little; see `Rows`."""
        if self.is_running:
            pace = (tolerance / self.residual) ** (1 / (MAX_SPEED_UP * periods))
            pace = min(pace, MIN_RESIDUAL_REDUCTION)
            self.is_running = self.residual <= pace * self.mark
        self.mark = self.residual
        self.running_count = int(self.is_running)

    def drop_finished(self, share: float) -> None:
        """Do nothing: a finished solve has no rows left."""

    def results(self) -> Answers:
        """Return the answer, in tensors with one entry."""
        new = self.best.new_tensor
        return Answers(
            best=self.best,
            residual=new([self.residual]),
            absolute=new([self.absolute]),
            status=new([self.status], dtype=torch.int8),
            iterations=new([self.iteration], dtype=torch.int64),
        )


class Recorder:
    """Collects the trace of a solve."""

    def __init__(self, problem: FixedPointProblem, *, states: bool) -> None:
        self.problem = problem
        self.records_states = states
        self.residuals: list[Tensor] = []
        self.states: list[State] = []

    def record(self, rows: Rows | OneRow, image: Tensor) -> None:
        latest = rows.latest
        self.residuals.append(latest)
        if self.records_states:
            moved = torch.isnan(latest).logical_not()
            self.states.append(self.problem.unpack(torch.where(moved[:, None], image, rows.best)))

    def trace(self) -> Trace:
        residual = torch.stack(self.residuals) if self.residuals else torch.empty(0, 0)
        return Trace(residual, self.states if self.records_states else None)
