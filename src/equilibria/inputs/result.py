"""What an input optimization found, problem by problem."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.inputs.problem import InputProblem
from equilibria.solvers import Status


@dataclass(frozen=True)
class InputResult:
    """Optimized inputs with their equilibria, adjoints and true losses.

    Per-problem tensors have one entry a row of x0. The losses are those at equilibria that were
    solved anew, tightly, at the inputs themselves.
    """

    x: Tensor
    """The inputs: feasible to the last bit."""
    state: State
    """z*, the equilibrium at x."""
    adjoint: State
    """μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z at x (the raw one of the search where `polish=False`)."""
    loss: Tensor
    initial_loss: Tensor
    status: Tensor
    state_residual: Tensor
    """‖T(z; x) − z‖/‖T(z; x)‖."""
    adjoint_residual: Tensor
    """‖Jᵀμ + ∂ℓ/∂z − μ‖/‖Jᵀμ + ∂ℓ/∂z‖."""
    input_residual: Tensor
    """‖x − Π(x − α d)‖, a step of x, relative to the size of the constraint (or of x0)."""
    iterations: Tensor
    evaluations: int
    """Calls of T in the search, each for the whole batch."""
    vjps: int
    """Pull-backs through T in the search and for μ."""
    check_evaluations: int
    """Calls of T for the true losses before and after."""
    engine: str
    tolerance: float
    problem: InputProblem = field(repr=False)

    @property
    def converged(self) -> Tensor:
        return self.status == int(Status.CONVERGED)

    @property
    def residual(self) -> Tensor:
        """The largest of the three residuals of each problem."""
        kinds = (self.state_residual, self.adjoint_residual, self.input_residual)
        return torch.stack(kinds).amax(dim=0)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """What the model says at the equilibria of the result; nothing is solved anew."""
        problem = self.problem
        context = problem.inject(self.x)
        outputs: Tensor = problem.head(problem.layer.cell.output(self.state, context))
        return outputs

    def message(self, problem: int) -> str:
        """A sentence on how one problem ended, with the remedy."""
        status = Status(int(self.status[problem]))
        residual = float(self.residual[problem])
        count = int(self.iterations[problem])
        if status is Status.CONVERGED:
            return f"converged to a residual of {residual:.1e} in {count} iterations"
        if status is Status.OUT_OF_ITERATIONS:
            return (
                f"out of iterations: residual {residual:.1e} after {count}, tolerance "
                f"{self.tolerance:.1e}; raise iterations or the tolerance, or lower step_size"
            )
        return (
            f"diverged after {count} iterations: x0 holds NaN or Inf, or a step left the region "
            "where the model is defined; check x0, lower step_size or add a constraint"
        )

    def summary(self) -> str:
        """One line on all problems, with the remedy for the worst of them."""
        total, done = self.status.numel(), int(self.converged.sum())
        worst = int(torch.argmax(self.status))
        tail = "" if done == total else f"; problem {worst}: {self.message(worst)}"
        return (
            f"{done} of {total} inputs converged ({self.engine}); mean loss "
            f"{float(self.initial_loss.mean()):.4g} → {float(self.loss.mean()):.4g} in "
            f"{self.evaluations} evaluations of the map and {self.vjps} pull-backs{tail}"
        )
