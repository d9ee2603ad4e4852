"""How the solves of many batches went, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equilibria.solvers import Solution


@dataclass
class SolveStatistics:
    """Collects the solutions of batches, problem by problem.

    Models without an equilibrium leave no solutions: the numbers are then None, not made up.
    """

    iterations: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    converged: list[Tensor] = field(default_factory=list)

    def observe(self, model: nn.Module) -> None:
        """Take in the last solve of a model."""
        solution = getattr(model, "last_solution", None)
        if isinstance(solution, Solution):
            self.iterations.append(solution.iterations)
            self.residuals.append(solution.residual)
            self.converged.append(solution.converged)

    def sums(self) -> Tensor:
        """How many problems converged, all their iterations, and how many there were."""
        if not self.converged:
            return torch.zeros(3, dtype=torch.float64)
        converged = torch.cat(self.converged).double()
        iterations = torch.cat(self.iterations).double()
        return torch.stack(
            (converged.sum(), iterations.sum(), converged.new_tensor(len(converged)))
        ).cpu()

    @property
    def share_converged(self) -> float | None:
        return float(torch.cat(self.converged).double().mean()) if self.converged else None

    @property
    def mean_iterations(self) -> float | None:
        return float(torch.cat(self.iterations).double().mean()) if self.iterations else None

    @property
    def max_iterations(self) -> int | None:
        return int(torch.cat(self.iterations).max()) if self.iterations else None

    @property
    def max_residual(self) -> float | None:
        """The largest relative residual ‖T(y) − y‖/‖T(y)‖."""
        return float(torch.cat(self.residuals).max()) if self.residuals else None
