"""The one loop that every solver runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.registry import check_at_least_one, check_share, check_tolerances
from equilibria.solvers.asking import is_free_to_ask
from equilibria.solvers.convergence import (
    Iterate,
    RelativeResidual,
    Residuals,
    Scale,
    StoppingCriterion,
    finest_tolerance,
)
from equilibria.solvers.minima import at_minima
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.scratch import Scratch
from equilibria.solvers.solution import Solution, Status, Trace

STALLED = 0.9
"""A residual that has not fallen to this share of what it was has stopped falling."""
DESCENT_BUDGET = 100
"""How many times `max_iterations` a descent may cost."""
OPTIMISM = 2.0
"""How much faster a solve may become than it has been: else it is too slow to end in time."""


class Memory:
    """What a solver remembers of earlier iterations: tensors with one row a problem, or nothing."""

    def difference(self, image: Tensor, point: Tensor) -> Tensor:
        """T(y) − y, where the next `propose` expects it."""
        return image - point

    def keep(self, rows: Tensor) -> None:
        """Forget the rows that are not in `rows`."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])

    def end(self) -> None:
        """Nothing is asked of it any more."""
        for value in vars(self).values():
            if isinstance(value, Scratch):
                value.give_back()


if TYPE_CHECKING:
    from equilibria.solvers.descent import Descent

M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, kw_only=True)
class Solver(ABC, Generic[M]):
    """Finds fixed points. A new solver says what it remembers and where to evaluate the map next.

    The loop around it owns the rest: limits, stopping each sample on its own, the best point so
    far, non-finite values, tracing, and dropping finished samples from the batch.

    tolerance: relative residual ‖T(y) − y‖/‖T(y)‖ at which a sample has converged.
    max_iterations: evaluations of the map after which a sample is given up.
    patience: every so many iterations samples are given up whose residual has fallen too little to
        reach the tolerance in time, and before the first of these looks any whose residual does
        not fall in a step: the map does not contract (None: never).
    stop: when a sample has converged, if not by the tolerance.
    check_every: the host asks every so many iterations which samples have ended. Samples stop at
        the same iterates whatever it is, but are computed in vain for a while: worth more than 1
        on devices where asking stalls the queue.
    check_minimum: test whether a sample has converged to a minimum where the hidden objective is
        not known to be convex, by a few products with its Hessian, and descend from any other
        point. Without the test such a sample has `Status.STATIONARY`.
    drop_share: share of finished samples at which they are dropped from the batch (1: not before
        all are). Dropping copies what the solver remembers, so one with a long memory waits longer.

    Examples:
        >>> patient = eq.Anderson(tolerance=1e-6, max_iterations=500)  # as all solvers
        >>> isinstance(patient, eq.solvers.Solver), patient.max_iterations
        (True, 500)
    """

    tolerance: float = 1e-4
    max_iterations: int = 100
    drop_share: float = 0.5
    patience: int | None = None
    stop: StoppingCriterion | None = None
    check_every: int = 1
    check_minimum: bool = True

    def __post_init__(self) -> None:
        check_tolerances(tolerance=self.tolerance)
        check_at_least_one(
            max_iterations=self.max_iterations, patience=self.patience, check_every=self.check_every
        )
        check_share(drop_share=self.drop_share)

    def patience_with(self, problem: FixedPointProblem) -> int | None:
        """The patience with this problem: less where there is another way to solve it."""
        return self.patience

    @property
    def steady(self) -> bool:
        """Whether on a map that contracts its residual falls in every step, to first order.

        So it is for plain steps, and for T of the mixture with the smallest residual.
        """
        return True

    @property
    def couples_batch(self) -> bool:
        """Whether the solver itself relates the samples of a batch to each other."""
        return False

    @property
    def criterion(self) -> StoppingCriterion:
        return RelativeResidual(self.tolerance) if self.stop is None else self.stop

    @property
    def method(self) -> str:
        """What the solver is called in a `Solution`."""
        return type(self).__name__

    @abstractmethod
    def begin(self, start: Tensor) -> M:
        """The memory before the first iteration; `start` is the `(problems, size)` buffer."""

    @abstractmethod
    def propose(self, memory: M, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        """The next point, given the last one, its image T(point), and change = image − point."""

    def unrolled_step(self, point: State, image: State, iteration: int) -> State:
        """The next state, given one and its image, where a gradient rule unrolls the iteration.

        Plain, y ← T(y), unless a solver has a differentiable step of its own.
        """
        return image

    def warm_up(self, problem: FixedPointProblem) -> tuple[Tensor, FixedPointProblem, int]:
        """Iterate plainly while the map is renewed: the point then, the fixed map, the steps."""
        point = problem.take_start()
        steps = 0
        while problem.refresh is not None and steps < problem.refresh_until:
            point = problem.evaluate(point)
            problem = problem.refreshed(point)
            steps += 1
        return point, problem, steps

    @property
    def descent(self) -> Descent:
        """What goes on, on the hidden objective, where this solver cannot."""
        from equilibria.solvers.descent import Descent

        budget = DESCENT_BUDGET * self.max_iterations
        return Descent(tolerance=self.tolerance, max_iterations=budget, stop=self.stop)

    @torch.no_grad()
    def solve(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Solve `problem`, each sample to its own end.

        A tolerance below four times the precision of the state's numbers counts as that: rounding
        would decide which samples reach it. A sample that has converged on an objective that is not
        known to be convex is tested for negative curvature; from a saddle or a maximum it descends.

        Args:
            problem: The map, its context, and where to start.
            trace: Whether to record the residuals of every iteration, or the states too.

        Returns:
            The states, with a status for each sample.
        """
        finest = finest_tolerance(problem.state_dtype)
        if self.tolerance < finest:
            return replace(self, tolerance=finest).solve(problem, trace=trace)
        potential = problem.potential
        solution = self.run(problem, trace=trace)
        if potential is None or potential.is_convex or self.stop is not None:
            return solution
        if not self.check_minimum:
            reached = solution.status == int(Status.CONVERGED)
            status = solution.status.masked_fill(reached, int(Status.STATIONARY))
            return replace(solution, status=status)

        def descend(rest: FixedPointProblem) -> Solution:
            return self.descent.run(rest, trace=trace or problem.trace)

        return at_minima(problem, solution, self.tolerance, descend)

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """The iteration of `solve`, without what `solve` checks before and after it."""
        trace = trace or problem.trace
        if notes := self.criterion.notes():
            problem = problem.in_context(problem.context.with_sample(**notes))
        point, problem, warm_up = self.warm_up(problem)
        image = problem.evaluate(point) if len(point) else point
        problem, point, image = problem.in_own_units(point, image)
        progress = _Progress(point, self.criterion, warm_up)
        recorder = _Recorder(problem, states=trace == "states") if trace else None
        may_drop = recorder is None or not recorder.wants_states
        memory = self.begin(point)
        patience = self.patience_with(problem)
        propose = self.propose
        if torch.is_autocast_enabled(problem.device_type):
            # The map computes in half precision; what is made of its images stays in single.
            propose = torch.autocast(problem.device_type, enabled=False)(propose)
        current = problem
        iteration = 1
        sample_evaluations = (warm_up + 1) * point.shape[0]
        while True:
            change = memory.difference(image, point)
            must_fall = 1 < iteration < (patience or 0) and (iteration == 2 or self.steady)
            asking = iteration % self.check_every == 0 or iteration == self.max_iterations
            progress.observe(current, image, change, must_fall=must_fall, asking=asking)
            if recorder is not None:
                recorder.record(progress, image)
            if not progress.running_count or iteration == self.max_iterations:
                break
            if patience is not None and iteration % patience == 0:
                periods = (self.max_iterations - iteration) / patience
                progress.give_up_stalled(self.tolerance, periods)
                if not progress.running_count:
                    break
            point = propose(memory, point, image, change)
            del change  # as large as the state, and not needed while the map is evaluated
            finished = image.shape[0] - progress.running_count
            if finished and may_drop and finished >= self.drop_share * image.shape[0]:
                rows = progress.drop_finished()
                memory.keep(rows)
                point = point[rows]
                current = current.keep(rows)
            iteration += 1
            image = current.evaluate(point)
            sample_evaluations += image.shape[0]
        memory.end()
        results = progress.results()
        return Solution(
            state=problem.unpack(results.best),
            status=results.status,
            residual=results.residual,
            absolute_residual=problem.in_numbers(results.absolute),
            iterations=results.iterations,
            evaluations=warm_up + iteration,
            sample_evaluations=sample_evaluations,
            tolerance=self.tolerance,
            solver=self.method,
            epsilon=problem.epsilon,
            context=problem.context,
            trace=recorder.trace() if recorder is not None else None,
            remedy=problem.remedy,
        )


class _Progress:
    """Where each problem stands: its best image so far, and whether it still runs.

    `index` maps the rows that are still in the batch to the problems; the results of dropped rows
    wait in full-size tensors. On most iterations every row runs on and has improved: then nothing
    is copied and nothing but the residuals is computed.
    """

    def __init__(self, start: Tensor, criterion: StoppingCriterion, iterations: int) -> None:
        problems = start.shape[0]
        self.problems = problems
        self.criterion = criterion
        self.scale = Scale()
        self.index: Tensor | None = None
        self.dropped: _Results | None = None
        infinite = start.new_full((problems,), torch.inf)
        self.rows = _Results(
            best=start,
            residual=infinite,
            absolute=infinite,
            status=torch.full_like(infinite, Status.OUT_OF_ITERATIONS, dtype=torch.int8),
            iterations=torch.full_like(infinite, iterations, dtype=torch.int64),
        )
        self.running = torch.ones_like(infinite, dtype=torch.bool)
        self.running_count = problems
        """When the host last asked."""
        self.asked = True
        """Whether that was at the last iteration."""
        self.mark: Tensor | None = None
        """The best residual of each row when `give_up_stalled` last looked, or at first."""
        self.latest = infinite
        """The relative residual of this iteration; NaN for rows that had stopped before it."""
        self.absolute = infinite
        """‖T(y) − y‖ of this iteration."""
        self.unbooked = 0
        """Iterations of all rows that are not yet in `rows.iterations`."""

    def observe(
        self,
        problem: FixedPointProblem,
        image: Tensor,
        change: Tensor,
        *,
        must_fall: bool,
        asking: bool,
    ) -> None:
        """Take in T(y) and T(y) − y of every row; end those whose residual must fall, and rose.

        asking: how many run on, the one question at which the host waits for the device.
        """
        rows = self.rows
        residuals = self.scale.measure(image, change, problem.rounding)
        absolute, relative = residuals.absolute, residuals.relative
        if asking and self._all_go_on(residuals, must_fall):
            improved = relative < rows.residual
            rows.keep_better(image, residuals, improved, everywhere=bool(improved.all()))
            self.latest, self.absolute = relative, absolute
            self.mark = relative if self.mark is None else self.mark
            self.unbooked += 1
            return
        self._book()
        reached = residuals.bounded & self.criterion.reached(Iterate(problem, image, residuals))
        going = residuals.bounded ^ reached
        # What a criterion of its own is content with is what counts, though its residual be larger.
        improved = (residuals.bounded & (relative < rows.residual)) | reached
        if must_fall:
            going &= absolute < self.absolute
        self.latest, self.absolute = relative, absolute
        if self.running_count < len(absolute) or not self.asked:
            self.latest = torch.where(self.running, relative, torch.nan)
            going &= self.running
            improved &= self.running
        count, better = self.running_count, 0
        if asking:
            # Both numbers in one.
            base = len(absolute) + 1
            count, better = divmod(int(base * going.sum() + improved.sum()), base)
        rows.keep_better(image, residuals, improved, everywhere=better == len(absolute))
        self.mark = relative if self.mark is None else self.mark
        rows.iterations += self.running
        if count < self.running_count or not asking or not self.asked:
            ended = self.running & ~going
            lost = ended & ~residuals.bounded if must_fall else ended
            status = torch.where(lost, int(Status.DIVERGED), rows.status)
            rows.status = torch.where(ended & reached, int(Status.CONVERGED), status)
            self.running, self.running_count = going, count
        self.asked = asking

    def _all_go_on(self, residuals: Residuals, must_fall: bool) -> bool:
        """Whether every row was running and runs on: so it is on most iterations.

        The host asks, which costs nothing on a CPU; elsewhere it would be one question too many.
        """
        relative, criterion = residuals.relative, self.criterion
        if not isinstance(criterion, RelativeResidual) or not is_free_to_ask(relative):
            return False
        if not self.asked or self.running_count < len(relative):
            return False
        going = residuals.bounded & (relative > criterion.tolerance)
        if must_fall:
            going &= residuals.absolute < self.absolute
        return bool(going.all())

    def _book(self) -> None:
        """Count the iterations in which nothing happened but progress."""
        if self.unbooked:
            self.rows.iterations += self.unbooked
            self.unbooked = 0

    def give_up_stalled(self, tolerance: float, periods: float) -> None:
        """End the rows whose best residual has fallen too little since the last call.

        periods: how many times as many iterations are left as there were since then.
        """
        pace = (tolerance / self.rows.residual).pow(1 / (OPTIMISM * periods)).clamp_max(STALLED)
        before = self.rows.residual if self.mark is None else self.mark
        stalled = self.running & ~(self.rows.residual <= pace * before)
        self.mark = self.rows.residual
        self.running = self.running & ~stalled
        self.running_count = int(self.running.sum())

    def drop_finished(self) -> Tensor:
        """Put the finished rows aside; the rows that remain, as an index into the present ones."""
        self._book()
        if self.dropped is None or self.index is None:
            self.dropped = self.rows.empty_like()
            self.index = torch.arange(self.problems, device=self.running.device)
        done, rows = (mask.nonzero().squeeze(1) for mask in (~self.running, self.running))
        self.dropped.store(self.rows.keep(done), self.index[done])
        self.rows = self.rows.keep(rows)
        self.index = self.index[rows]
        self.running = self.running[rows]
        self.latest, self.absolute = self.latest[rows], self.absolute[rows]
        self.mark = None if self.mark is None else self.mark[rows]
        self.scale.keep(rows)
        return rows

    def scatter(self, values: Tensor, fill: float) -> Tensor:
        """Values of the present rows, at the places of their problems."""
        if self.index is None:
            return values
        full = values.new_full((self.problems,), fill)
        full[self.index] = values
        return full

    def results(self) -> _Results:
        """What was found, at the places of the problems."""
        self._book()
        if self.dropped is None or self.index is None:
            return self.rows
        self.dropped.store(self.rows, self.index)
        return self.dropped


@dataclass
class _Results:
    """What is known of each row."""

    best: Tensor
    residual: Tensor
    absolute: Tensor
    status: Tensor
    iterations: Tensor

    def keep_better(
        self, image: Tensor, residuals: Residuals, improved: Tensor, *, everywhere: bool
    ) -> None:
        """Take the rows of `image` that have improved."""
        if everywhere:
            self.best, self.residual = image, residuals.relative
            self.absolute = residuals.absolute
            return
        self.best = torch.where(improved[:, None], image, self.best)
        self.residual = torch.where(improved, residuals.relative, self.residual)
        self.absolute = torch.where(improved, residuals.absolute, self.absolute)

    def keep(self, rows: Tensor) -> _Results:
        return _Results(*(getattr(self, f.name)[rows] for f in fields(self)))

    def empty_like(self) -> _Results:
        return _Results(*(torch.empty_like(getattr(self, f.name)) for f in fields(self)))

    def store(self, results: _Results, at: Tensor) -> None:
        for f in fields(self):
            getattr(self, f.name)[at] = getattr(results, f.name)


class _Recorder:
    """Collects the trace of a solve."""

    def __init__(self, problem: FixedPointProblem, *, states: bool) -> None:
        self.problem = problem
        self.wants_states = states
        self.residuals: list[Tensor] = []
        self.states: list[State] = []

    def record(self, progress: _Progress, image: Tensor) -> None:
        self.residuals.append(progress.scatter(progress.latest, torch.nan))
        if self.wants_states:
            moved = torch.isnan(progress.latest).logical_not()
            shown = torch.where(moved[:, None], image, progress.rows.best)
            self.states.append(self.problem.unpack(shown))

    def trace(self) -> Trace:
        residual = torch.stack(self.residuals) if self.residuals else torch.empty(0, 0)
        return Trace(residual, self.states if self.wants_states else None)
