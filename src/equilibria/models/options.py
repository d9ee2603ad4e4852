"""Options that all models share."""

from __future__ import annotations

from typing import Any

import torch

from equilibria.equilibrium import Solving
from equilibria.operators import LinearOperator
from equilibria.solvers import Solver


def solver_from_options(
    solver: str | Solver[Any], tolerance: float | None, max_iterations: int | None
) -> Solver[Any]:
    """A solver by name or as an object, with these limits where they are given."""
    return Solving(solver=solver, tolerance=tolerance, max_iterations=max_iterations).solver  # type: ignore[arg-type]


@torch.no_grad()
def initialize_small(operator: LinearOperator, scale: float) -> None:
    """Shrink an operator's initial weights: small norms make the first solves short (OptEq 7.4)."""
    for parameter in operator.parameters():
        parameter.mul_(scale)
