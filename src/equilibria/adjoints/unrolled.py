"""Differentiating through the iterations themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint as run_checkpointed

from equilibria.adjoints.base import BackwardLog, GradientRule, Map, needs_graph
from equilibria.context import Context, State
from equilibria.solvers import FixedPointProblem, Solution, Solver, Status


@dataclass(frozen=True)
class Unrolled(GradientRule):
    """`steps` plain iterations y ← T(y; x), recorded by autograd (OptEq, Algorithm 1).

    The output is the last iterate, in training and in evaluation alike; of the solver only its
    tolerance is used, for the status. **Approximate** as a gradient of the equilibrium (the error
    falls like q^steps), exact for the iterate. Memory grows with `steps`; with `checkpoint=k` only
    every k-th iterate is kept and the rest is recomputed in the backward pass.
    """

    exact: ClassVar[bool] = False
    steps: int = 20
    checkpoint: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if self.checkpoint is not None and self.checkpoint < 1:
            raise ValueError(f"checkpoint must be at least 1 or None, not {self.checkpoint}")

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Solver[Any], log: BackwardLog
    ) -> tuple[State, Solution]:
        point, context = problem.start, problem.context
        warm_up = min(problem.refresh_until, self.steps - 1) if problem.refresh else 0
        for _ in range(warm_up):
            point = cell.step(point, context)
            assert problem.refresh is not None
            context = problem.refresh(point, context)
        remaining = self.steps - 1 - warm_up
        save = self.checkpoint if needs_graph(cell, context) else None
        segment = save or max(remaining, 1)
        while remaining > 0:
            count = min(segment, remaining)
            if save is None:
                point = _iterate(cell, context, point, count)
            else:
                point = run_checkpointed(_iterate, cell, context, point, count, use_reentrant=False)
            remaining -= count
        image = cell.step(point, context)
        return image, self._solution(problem, context, point, image, solver.tolerance)

    @torch.no_grad()
    def _solution(
        self,
        problem: FixedPointProblem,
        context: Context,
        point: State,
        image: State,
        tolerance: float,
    ) -> Solution:
        mapped = problem.pack(image)
        absolute = torch.linalg.vector_norm(mapped - problem.pack(point), dim=1)
        size = torch.linalg.vector_norm(mapped, dim=1)
        relative = torch.where(absolute > 0, absolute / size, absolute)
        status = torch.where(
            relative <= tolerance, int(Status.CONVERGED), int(Status.OUT_OF_ITERATIONS)
        )
        status = torch.where(torch.isfinite(absolute), status, int(Status.DIVERGED))
        problems = mapped.shape[0]
        return Solution(
            state=problem.unpack(mapped),
            status=status.to(torch.int8),
            residual=relative,
            absolute_residual=absolute,
            iterations=torch.full_like(status, self.steps),
            evaluations=self.steps,
            sample_evaluations=self.steps * problems,
            tolerance=tolerance,
            solver="Unrolled",
            epsilon=problem.epsilon,
            context=context,
        )


def _iterate(cell: Map, context: Context, point: State, count: int) -> State:
    for _ in range(count):
        point = cell.step(point, context)
    return point
