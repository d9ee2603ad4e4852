"""The solver base class, and the one loop that every solver runs in."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from equilibria.registry import check_at_least_one, check_share
from equilibria.solvers._cpu import Scratch
from equilibria.solvers._rows import Recorder, track
from equilibria.solvers.method import Method
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution


class Memory:
    """What a solver remembers of earlier iterations: tensors with one row per problem."""

    def difference(self, image: Tensor, point: Tensor) -> Tensor:
        """Return T(y) − y; a memory may write it where the next `propose` needs it."""
        return image - point

    def keep(self, rows: Tensor) -> None:
        """Remove the rows that are not in `rows`."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])

    def end(self) -> None:
        """Release the buffers; the memory is not used any more."""
        for value in vars(self).values():
            if isinstance(value, Scratch):
                value.give_back()


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, kw_only=True)
class Solver(Method, Generic[M]):
    """Base class of solvers that iterate a map. A subclass defines `begin` and `propose`.

    `begin` makes the memory of the solver, `propose` returns the point at which the map is
    evaluated next. The loop in `run` does the rest: limits, stopping each sample on its own, the
    best point so far, non-finite values, tracing, and removing finished samples from the batch.

    Args:
        tolerance: Relative residual ‖T(y) − y‖/‖T(y)‖ at which a sample has converged.
        max_iterations: Largest number of evaluations of the map per sample.
        stop: Stopping criterion that replaces the tolerance.
        check_minimum: Test whether a sample has converged to a minimum where the hidden objective
            is not known to be convex, by a few products with its Hessian, and descend from any
            other point. Without the test such a sample has `Status.STATIONARY`.
        patience: Every `patience` iterations, give up samples whose residual has fallen too little
            to reach the tolerance in time. Before the first of these checks, give up samples whose
            residual does not fall in a step: the map does not contract. None: never.
        check_every: Number of iterations between two host synchronizations, which find out which
            samples have ended. Samples stop at the same iterates whatever it is, but are evaluated
            in vain for a while. Values above 1 pay on devices where reading stalls the queue.
        drop_share: Share of finished samples at which they are removed from the batch (1: not
            before all are). Removal copies the memory of the solver, so a solver with a long memory
            waits longer.

    Examples:
        >>> patient = eq.Anderson(tolerance=1e-6, max_iterations=500)  # as all solvers
        >>> isinstance(patient, eq.solvers.Solver), patient.max_iterations
        (True, 500)
    """

    patience: int | None = None
    check_every: int = 1
    drop_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(patience=self.patience, check_every=self.check_every)
        check_share(drop_share=self.drop_share)

    @abstractmethod
    def begin(self, start: Tensor) -> M:
        """Return the memory before the first iteration; `start` has shape `(problems, size)`."""

    @abstractmethod
    def propose(self, memory: M, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        """Return the next point.

        Args:
            memory: What `begin` returned; to be updated.
            point: The last point y, shape (problems, size).
            image: T(y).
            change: T(y) − y.
        """

    @property
    def steady(self) -> bool:
        """Whether the residual falls in every step if the map contracts, to first order.

        It does for plain steps, and for T of the mixture with the smallest residual.
        """
        return True

    def patience_with(self, problem: FixedPointProblem) -> int | None:
        """Return the patience with this problem: less where there is another way to solve it."""
        return self.patience

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Iterate until every sample has ended; without the minimum check of `solve`."""
        criterion = self.criterion
        if notes := criterion.notes():
            problem = problem.in_context(problem.context.with_sample(**notes))
        problem, point, warm_up = self.warm_up(problem)
        image = problem.evaluate(point) if point.shape[0] else point
        problem, point, image = problem.in_own_units(point, image)
        trace = trace or problem.trace
        recorder = Recorder(problem, states=trace == "states") if trace else None
        may_drop = trace != "states"
        patience = self.patience_with(problem)
        propose = self.propose
        if torch.is_autocast_enabled(problem.device_type):
            # The map computes in half precision; the solver stays in single precision.
            propose = torch.autocast(problem.device_type, enabled=False)(propose)

        rows = track(problem, point, criterion, warm_up)
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
                must_fall=1 < iteration < (patience or 0) and (iteration == 2 or self.steady),
                read=iteration % self.check_every == 0 or iteration == self.max_iterations,
            )
            if recorder is not None:
                recorder.record(rows, image)
            left = self.max_iterations - iteration
            if patience is not None and left and rows.running_count and iteration % patience == 0:
                rows.give_up_stalled(self.tolerance, left / patience)
            if not left or not rows.running_count:
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
