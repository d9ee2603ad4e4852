"""What a backward solve found, problem by problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.solvers.solution import Status

LinearMap = Callable[[Tensor], Tensor]
"""v ↦ A v on the rows of a `(problems, size)` buffer."""


@dataclass(frozen=True)
class LinearSolution:
    """The solution of A u = g for each row, and how well it was found."""

    value: Tensor
    status: Tensor
    residual: Tensor
    """Relative residual ‖g − A u‖ / ‖g‖."""
    iterations: Tensor
    evaluations: int
    tolerance: float
    method: str

    @property
    def converged(self) -> Tensor:
        return self.status == Status.CONVERGED

    def summary(self) -> str:
        total = self.status.numel()
        failed = int((~self.converged).sum())
        if failed == 0:
            return f"all {total} backward solves converged to {self.tolerance:.1e} ({self.method})"
        worst = int(torch.argmax(torch.nan_to_num(self.residual, nan=torch.inf)))
        return (
            f"the backward solve ({self.method}) of {failed} of {total} samples did not converge, "
            f"so their gradient is inexact: the worst relative residual is "
            f"{float(self.residual[worst]):.1e}, the tolerance {self.tolerance:.1e}. Raise "
            "max_iterations or the tolerance of the adjoint, or bound the norm of W (norm='bound')"
        )
