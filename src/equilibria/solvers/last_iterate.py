"""The solution of an iteration of fixed length: the image of its last iterate."""

from __future__ import annotations

import torch

from equilibria.context import Context, State
from equilibria.solvers.convergence import final_status, relative_residual, row_norms
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution


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
