"""Options that all models share."""

from __future__ import annotations

from typing import Any

import torch

from equilibria.operators import LinearOperator
from equilibria.solvers import Solver, get_solver


def solver_from_options(
    solver: str | Solver[Any], tolerance: float | None, max_iterations: int | None
) -> Solver[Any]:
    """A solver by name with its limits; a solver object brings its own."""
    options: dict[str, Any] = {}
    if tolerance is not None:
        options["tolerance"] = tolerance
    if max_iterations is not None:
        options["max_iterations"] = max_iterations
    if isinstance(solver, Solver):
        if options:
            raise ValueError(
                f"{' and '.join(options)} given beside a solver object: "
                f"set them there, e.g. {type(solver).__name__}(tolerance=1e-4)"
            )
        return solver
    return get_solver(solver, **options)


@torch.no_grad()
def initialize_small(operator: LinearOperator, scale: float) -> None:
    """Shrink an operator's initial weights: small norms make the first solves short (OptEq 7.4)."""
    for parameter in operator.parameters():
        parameter.mul_(scale)
