"""The solution of an iteration of fixed length: the image of its last iterate."""

from __future__ import annotations

import torch

from equilibria.context import Context, State
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status


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
    absolute = torch.linalg.vector_norm(mapped - problem.pack(point), dim=1)
    size = torch.linalg.vector_norm(mapped, dim=1)
    relative = torch.where(absolute > 0, absolute / size, absolute)
    status = torch.where(
        relative <= tolerance, int(Status.CONVERGED), int(Status.OUT_OF_ITERATIONS)
    )
    status = torch.where(torch.isfinite(absolute), status, int(Status.DIVERGED))
    return Solution(
        state=problem.unpack(mapped),
        status=status.to(torch.int8),
        residual=relative,
        absolute_residual=absolute,
        iterations=torch.full_like(status, steps),
        evaluations=steps,
        sample_evaluations=steps * mapped.shape[0],
        tolerance=tolerance,
        solver=solver,
        epsilon=problem.epsilon,
        context=context,
        remedy=problem.remedy,
    )
