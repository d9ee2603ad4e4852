"""The one loop that every solver runs in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status, Trace

DIVERGENCE_FACTOR = 1e6
"""A residual this many times larger than the first residual and the first image has diverged."""


class Memory(ABC):
    """What a solver remembers of earlier iterations, one row a problem."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Forget the rows that are not in `rows`."""


class Nothing(Memory):
    """The memory of a solver that needs none."""

    def keep(self, rows: Tensor) -> None:
        return


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, kw_only=True)
class Solver(ABC, Generic[M]):
    """Finds fixed points. A new solver says what it remembers and where to evaluate the map next.

    The loop around it owns the rest: limits, stopping each sample on its own, the best point so
    far, non-finite values, tracing, and dropping finished samples from the batch.

    tolerance: relative residual ‖T(y) − y‖/‖T(y)‖ at which a sample has converged.
    max_iterations: evaluations of the map after which a sample is given up.
    drop_share: share of finished samples at which they are dropped from the batch (1: never).
    """

    tolerance: float = 1e-4
    max_iterations: int = 100
    drop_share: float = 0.5

    def __post_init__(self) -> None:
        if not (self.tolerance > 0 and math.isfinite(self.tolerance)):
            raise ValueError(f"tolerance must be a positive number, not {self.tolerance}")
        if self.max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, not {self.max_iterations}")
        if not 0 < self.drop_share <= 1:
            raise ValueError(f"drop_share must be in (0, 1], not {self.drop_share}")

    @abstractmethod
    def begin(self, start: Tensor) -> M:
        """The memory before the first iteration; `start` is the `(problems, size)` buffer."""

    @abstractmethod
    def propose(self, memory: M, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        """The next point, given the last one, its image T(point), and change = image − point."""

    @torch.no_grad()
    def solve(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Solve `problem`, each sample to its own end."""
        point = problem.pack(problem.start)
        warm_up = 0
        while problem.refresh is not None and warm_up < problem.refresh_until:
            point = problem.evaluate(point)
            problem = problem.refreshed(point)
            warm_up += 1
        progress = _Progress.begin(point, warm_up)
        recorder = _Recorder(problem, states=trace == "states") if trace else None
        memory = self.begin(point)
        current = problem
        sample_evaluations = warm_up * point.shape[0]
        iteration = 0
        while progress.running_count and iteration < self.max_iterations:
            iteration += 1
            image = current.evaluate(point)
            sample_evaluations += image.shape[0]
            change = image - point
            progress.observe(image, change, self.tolerance)
            if recorder is not None:
                recorder.record(progress, image)
            if not progress.running_count or iteration == self.max_iterations:
                break
            point = self.propose(memory, point, image, change)
            finished = 1 - progress.running_count / image.shape[0]
            if finished >= self.drop_share and not (recorder and recorder.wants_states):
                rows = progress.drop_finished()
                memory.keep(rows)
                point = point[rows]
                current = current.keep(rows)
        return progress.solution(
            problem,
            tolerance=self.tolerance,
            evaluations=warm_up + iteration,
            sample_evaluations=sample_evaluations,
            trace=recorder.trace() if recorder is not None else None,
        )


class _Progress:
    """Where each problem stands: its best image so far, and whether it still runs.

    `index` maps the rows that are still in the batch to the problems; the results of dropped rows
    wait in full-size tensors.
    """

    def __init__(self, start: Tensor, iterations: int) -> None:
        problems = start.shape[0]
        self.problems = problems
        self.index: Tensor | None = None
        self.best = start.clone()
        infinite = start.new_full((problems,), torch.inf)
        self.best_residual = infinite
        self.best_absolute = infinite.clone()
        self.last_residual = infinite.clone()
        self.running = torch.ones(problems, dtype=torch.bool, device=start.device)
        self.running_count = problems
        self.status = torch.full(
            (problems,), Status.OUT_OF_ITERATIONS, dtype=torch.int8, device=start.device
        )
        self.iterations = torch.full(
            (problems,), iterations, dtype=torch.int64, device=start.device
        )
        self.largest = torch.zeros_like(infinite)
        self.limit: Tensor | None = None
        self.dropped: _Finished | None = None

    @classmethod
    def begin(cls, start: Tensor, iterations: int) -> _Progress:
        return cls(start, iterations)

    def observe(self, image: Tensor, change: Tensor, tolerance: float) -> None:
        """Take in T(y) and T(y) − y of every row."""
        absolute = torch.linalg.vector_norm(change, dim=1)
        size = torch.linalg.vector_norm(image, dim=1)
        self.largest = torch.maximum(self.largest, size)
        if self.limit is None:
            self.limit = DIVERGENCE_FACTOR * torch.maximum(absolute, size)
        # A fixed point at zero has no scale of its own: there, rounding of what was seen sets it.
        info = torch.finfo(image.dtype)
        scale = torch.maximum(size, info.eps * self.largest).clamp_min(info.tiny)
        relative = absolute / scale
        # NaN compares false with everything: only finite, bounded rows pass.
        sound = (absolute <= self.limit) & (absolute < torch.inf)
        improved = self.running & sound & (relative < self.best_residual)
        self.best = torch.where(improved[:, None], image, self.best)
        self.best_residual = torch.where(improved, relative, self.best_residual)
        self.best_absolute = torch.where(improved, absolute, self.best_absolute)
        self.last_residual = torch.where(self.running, relative, torch.nan)
        self.iterations += self.running
        converged = self.running & sound & (relative <= tolerance)
        diverged = self.running & ~sound
        self.status = torch.where(converged, int(Status.CONVERGED), self.status).to(torch.int8)
        self.status = torch.where(diverged, int(Status.DIVERGED), self.status).to(torch.int8)
        self.running = self.running & ~converged & ~diverged
        self.running_count = int(self.running.sum())

    def drop_finished(self) -> Tensor:
        """Put the finished rows aside; the rows that remain, as an index into the present ones."""
        if self.dropped is None:
            self.dropped = _Finished.like(self)
            self.index = torch.arange(self.problems, device=self.best.device)
        assert self.index is not None
        rows = self.running.nonzero().squeeze(1)
        done = (~self.running).nonzero().squeeze(1)
        self.dropped.store(self, done, self.index[done])
        self.index = self.index[rows]
        self.best = self.best[rows]
        self.best_residual = self.best_residual[rows]
        self.best_absolute = self.best_absolute[rows]
        self.last_residual = self.last_residual[rows]
        self.running = self.running[rows]
        self.status = self.status[rows]
        self.iterations = self.iterations[rows]
        self.largest = self.largest[rows]
        if self.limit is not None:
            self.limit = self.limit[rows]
        return rows

    def scatter(self, values: Tensor, fill: float) -> Tensor:
        """Values of the present rows, at the places of their problems."""
        if self.index is None:
            return values
        full = values.new_full((self.problems,), fill)
        full[self.index] = values
        return full

    def solution(
        self,
        problem: FixedPointProblem,
        *,
        tolerance: float,
        evaluations: int,
        sample_evaluations: int,
        trace: Trace | None,
    ) -> Solution:
        finished: _Progress | _Finished = self
        if self.dropped is not None:
            assert self.index is not None
            self.dropped.store(
                self, torch.arange(len(self.index), device=self.best.device), self.index
            )
            finished = self.dropped
        return Solution(
            state=problem.unpack(finished.best),
            status=finished.status,
            residual=finished.best_residual,
            absolute_residual=finished.best_absolute,
            iterations=finished.iterations,
            evaluations=evaluations,
            sample_evaluations=sample_evaluations,
            tolerance=tolerance,
            epsilon=problem.epsilon,
            context=problem.context,
            trace=trace,
        )


@dataclass
class _Finished:
    """The results of problems that have left the batch."""

    best: Tensor
    best_residual: Tensor
    best_absolute: Tensor
    status: Tensor
    iterations: Tensor

    @classmethod
    def like(cls, progress: _Progress) -> _Finished:
        return cls(
            torch.empty_like(progress.best),
            torch.empty_like(progress.best_residual),
            torch.empty_like(progress.best_absolute),
            torch.empty_like(progress.status),
            torch.empty_like(progress.iterations),
        )

    def store(self, progress: _Progress, rows: Tensor, problems: Tensor) -> None:
        self.best[problems] = progress.best[rows]
        self.best_residual[problems] = progress.best_residual[rows]
        self.best_absolute[problems] = progress.best_absolute[rows]
        self.status[problems] = progress.status[rows]
        self.iterations[problems] = progress.iterations[rows]


class _Recorder:
    """Collects the trace of a solve."""

    def __init__(self, problem: FixedPointProblem, *, states: bool) -> None:
        self.problem = problem
        self.wants_states = states
        self.residuals: list[Tensor] = []
        self.states: list[State] = []

    def record(self, progress: _Progress, image: Tensor) -> None:
        self.residuals.append(progress.scatter(progress.last_residual, torch.nan))
        if self.wants_states:
            moved = torch.isnan(progress.last_residual).logical_not()
            shown = torch.where(moved[:, None], image, progress.best)
            self.states.append(self.problem.unpack(shown))

    def trace(self) -> Trace:
        residual = torch.stack(self.residuals) if self.residuals else torch.empty(0, 0)
        return Trace(residual, self.states if self.wants_states else None)
