"""Base class of solvers that iterate a map, with the loop that all of them share.

A solve looks for y = T(y), where T is the step of a cell. The state is packed into a buffer of
shape (problems, size), with one row per problem: a sample, or a whole batch if its samples are
coupled. `point` is y, `image` is T(y), `change` is T(y) − y. T is evaluated once before iteration 1
and then at the end of each iteration, which is:

1. Compute T(y) − y at the point whose image is known.
2. Observe it (`_rows.py`): compute the residuals, store the image of each row whose residual is
   its smallest so far, and finish rows that converged, diverged, or cannot contract.
3. Record the trace. Every `patience` iterations, give up rows that are too slow.
4. Stop at `max_iterations`, or if no row runs.
5. Propose the next point (`propose`), which is all that differs between solvers.
6. Drop finished rows from the batch, and evaluate T at the next point.

The result of a row is T(y) for its best point y (or its last, with `iterate="last"`), with the
residual at that y.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from equilibria.registry import check_at_least_one, check_choice, check_share
from equilibria.solvers._cpu import Scratch
from equilibria.solvers._rows import Recorder, track
from equilibria.solvers.method import Method
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution


class Memory:
    """Memory of a solver between iterations: tensors with one row per problem."""

    def difference(self, image: Tensor, point: Tensor) -> Tensor:
        """Return T(y) − y; subclasses may write it into a buffer that `propose` reads."""
        return image - point

    def keep(self, rows: Tensor) -> None:
        """Remove the rows that are not in `rows`."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])

    def end(self) -> None:
        """Release the buffers at the end of a solve."""
        for value in vars(self).values():
            if isinstance(value, Scratch):
                value.give_back()


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, kw_only=True)
class Solver(Method, Generic[M]):
    """Base class of solvers that iterate a map. A subclass defines `begin` and `propose`.

    `begin` creates the memory of the solver; `propose` returns the point at which the map is
    evaluated next. The loop in `run` handles limits, per-sample stopping, the best point so far,
    non-finite values, tracing, and the removal of finished samples from the batch.

    Args:
        tolerance: Relative residual ‖T(y) − y‖/‖T(y)‖ at which a sample has converged.
        max_iterations: Largest number of iterations per sample, with one evaluation of the map
            each. For a map that still changes in its first iterations (`refresh_until` of the
            problem), these iterations come on top.
        stop: Stopping criterion that replaces the tolerance.
        check_minimum: For a map with a hidden objective (a function that is stationary at the fixed
            points) that is not known to be convex: test with a few Hessian products whether each
            converged sample is a minimum, and descend if it is not. Without the test such a sample
            has `Status.STATIONARY`.
        patience: Every `patience` iterations, give up samples whose residual has fallen too little
            to reach the tolerance in time; `tolerance` sets this pace even with `stop`. Before the
            first of these checks, also give up samples whose residual ‖T(y) − y‖ does not fall in
            a step in which it falls for every contracting map; a plain step y ← T(y) is one. Their
            status is OUT_OF_ITERATIONS. None never gives up.
        check_every: Number of iterations between two host synchronizations, which count the
            running samples. The results do not depend on it, but finished samples are evaluated
            until the next synchronization. Values above 1 help where reading stalls the device.
        drop_share: Share of finished samples at which they are removed from the batch; with 1 the
            batch keeps its size. Removal copies the memory of the solver, so it pays later for a
            solver with a long memory.
        iterate: The state of a sample that does not converge is T(y) at the point y with the
            smallest residual ("best") or at the last point ("last"). "best" is right if you need a
            fixed point. "last" is right for maps that make progress while their residual rises,
            such as those that reason step by step.

    Examples:
        >>> solver = eq.Anderson(tolerance=1e-6, max_iterations=500)
        >>> isinstance(solver, eq.solvers.Solver), solver.max_iterations
        (True, 500)
    """

    patience: int | None = None
    check_every: int = 1
    drop_share: float = 0.5
    iterate: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(patience=self.patience, check_every=self.check_every)
        check_choice(("best", "last"), iterate=self.iterate)
        check_share(drop_share=self.drop_share)

    @abstractmethod
    def begin(self, start: Tensor) -> M:
        """Return the memory before the first iteration.

        Args:
            start: Point at which the solve starts, shape (problems, size).
        """

    @abstractmethod
    def propose(self, memory: M, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        """Return the next point.

        Args:
            memory: Memory returned by `begin`, updated in place.
            point: Last point y, shape (problems, size); must not be modified.
            image: T(y), shape (problems, size); must not be modified, because it may be stored as
                the result.
            change: T(y) − y, shape (problems, size).
        """

    @property
    def steady(self) -> bool:
        """Whether ‖T(y) − y‖ falls in every step of a contracting map.

        Contracting means ‖T(y) − T(z)‖ ≤ q‖y − z‖ with q < 1. True for plain steps y ← T(y) and
        damped ones y ← y + d(T(y) − y), 0 < d ≤ 1. False unless a subclass says otherwise.
        """
        return False

    def starts_steady(self, problem: FixedPointProblem) -> bool:
        """Whether ‖T(y) − y‖ falls in the first step of a contracting map.

        Args:
            problem: Problem to solve; it may state more about the map.
        """
        return self.steady

    def is_steady_at(self, iteration: int, problem: FixedPointProblem) -> bool:
        """Whether ‖T(y) − y‖ must be less than in the iteration before, if the map contracts.

        Args:
            iteration: Number of the iteration, from 1. Iteration 2 evaluates the first step.
            problem: Problem to solve.
        """
        if iteration == 2:
            return self.starts_steady(problem)
        return iteration > 2 and self.steady

    def patience_with(self, problem: FixedPointProblem) -> int | None:
        """Return the patience for `problem`; a subclass with a fallback method may lower it.

        Args:
            problem: Problem to solve.
        """
        return self.patience

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Iterate until every sample has ended, without the minimum check of `solve`.

        Args:
            problem: Map, context and start.
            trace: True records the residuals of all iterations, "states" also the states.

        Returns:
            T(y) at the best or last point y of every sample, with its status and the residual at y.
        """
        criterion = self.criterion  # `stop`, or the relative residual with `tolerance`
        if notes := criterion.notes():
            problem = problem.in_context(problem.context.with_sample(**notes))
        # Plain steps y ← T(y), as long as the cell renews its context.
        problem, point, warm_up = self.warm_up(problem)
        image = problem.evaluate(point) if point.shape[0] else point
        # Rows whose squares would overflow or underflow are divided by a power of two.
        problem, point, image = problem.in_own_units(point, image)
        trace = trace or problem.trace
        recorder = Recorder(problem, states=trace == "states") if trace else None
        may_drop = trace != "states"
        patience = self.patience_with(problem)
        propose = self.propose
        if torch.is_autocast_enabled(problem.device_type):
            # The map computes in half precision; the solver stays in single precision.
            propose = torch.autocast(problem.device_type, enabled=False)(propose)

        keeps_last = self.iterate == "last"
        rows = track(problem, point, criterion, warm_up, keeps_last=keeps_last)
        memory = self.begin(point)
        current = problem
        iteration = 1
        sample_evaluations = (warm_up + 1) * point.shape[0]
        while True:
            change = memory.difference(image, point)
            rows.observe(
                current,
                image,
                change,
                must_fall=iteration < (patience or 0) and self.is_steady_at(iteration, problem),
                read=iteration % self.check_every == 0 or iteration == self.max_iterations,
            )
            if recorder is not None:
                recorder.record(rows, image)
            remaining = self.max_iterations - iteration
            if (
                patience is not None
                and remaining
                and rows.running_count
                and iteration % patience == 0
            ):
                rows.give_up_slow(self.tolerance, remaining / patience)
            if not remaining or not rows.running_count:
                break
            point = propose(memory, point, image, change)
            del change  # as large as the state, and not needed while the map is evaluated
            if may_drop and (kept := rows.drop_finished(self.drop_share)) is not None:
                memory.keep(kept)
                point, current = point[kept], current.keep(kept)
            image = current.evaluate(point)
            iteration += 1
            sample_evaluations += image.shape[0]
        memory.end()
        answers = rows.results()
        return Solution(
            state=problem.unpack(answers.best),
            status=answers.status,
            residual=answers.residual,
            absolute_residual=problem.in_numbers(answers.absolute),
            iterations=answers.iterations,
            evaluations=warm_up + iteration,
            sample_evaluations=sample_evaluations,
            tolerance=self.tolerance,
            solver=self.method,
            epsilon=problem.epsilon,
            context=problem.context,
            trace=recorder.trace() if recorder is not None else None,
            remedy=problem.remedy,
        )
