"""The result of a search over inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equilibria.context import State
from equilibria.inputs.problem import SMALL_RESIDUAL, InputProblem
from equilibria.solvers import Status
from equilibria.solvers.solution import describe


@dataclass(frozen=True)
class InputResult:
    """Optimized inputs with their equilibria, adjoints and true losses.

    Per-problem tensors have one entry per row of x0. The losses are those at equilibria that were
    solved anew, tightly, at the inputs themselves.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=5)
        >>> found.x.shape, found.iterations
        (torch.Size([1, 1, 8, 8]), tensor([5]))
    """

    x: Tensor
    """The inputs; they satisfy the constraint exactly."""
    state: State
    """z*, the equilibrium at x."""
    adjoint: State
    """μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z at x (that of the search where `polish=False`)."""
    loss: Tensor
    """ℓ at the equilibrium of x; NaN where that was not found."""
    initial_loss: Tensor
    """ℓ at the equilibrium of x0; NaN where that was not found."""
    status: Tensor
    state_residual: Tensor
    """‖T(z; x) − z‖/‖T(z; x)‖, or that of the solve for z if it is smaller."""
    adjoint_residual: Tensor
    """‖Jᵀμ + ∂ℓ/∂z − μ‖/‖Jᵀμ + ∂ℓ/∂z‖, or that of the solve for μ if it is smaller."""
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
    visited: tuple[Tensor, State] | None = None
    """One of the pairs (x, z) along the way, each as likely, where `visit` asked for it."""
    remedy: str = ""
    """What to do where an equilibrium was not found, so that there is no loss."""

    @property
    def converged(self) -> Tensor:
        """Whether each sample converged, shape (B,)."""
        return self.status == int(Status.CONVERGED)

    @property
    def residual(self) -> Tensor:
        """The largest of the three residuals of each problem."""
        kinds = (self.state_residual, self.adjoint_residual, self.input_residual)
        return torch.stack(kinds).amax(dim=0)

    def report_visited(self, model: nn.Module | None = None) -> None:
        """Report the visited pair (x, z) to `solving` blocks, which penalize the Jacobian there.

        See Eq. 27.

        Args:
            model: Model whose parameters the penalty reaches; None: the one that was searched.
        """
        if self.visited is not None:
            x, state = self.visited
            problem = self.problem if model is None else self.problem.on(model)
            problem.layer.report_visited(lambda: problem.cell_inputs(x), state)

    @torch.no_grad()
    def outputs(self) -> Tensor:
        """Return the outputs of the model at the equilibria of the result."""
        problem = self.problem
        context = problem.inject(self.x)
        outputs: Tensor = problem.head(problem.layer.cell.output(self.state, context))
        return outputs

    def message(self, problem: int) -> str:
        """A sentence on how one problem ended, with the remedy."""
        status, count = Status(int(self.status[problem])), int(self.iterations[problem])
        unsolved = not float(self.state_residual[problem]) <= SMALL_RESIDUAL
        if self.remedy and unsolved and bool(self.loss[problem].isnan()):
            return (
                "its equilibrium was not found: the solve at x ended at a relative residual of "
                f"{float(self.state_residual[problem]):.1e}, so its loss is NaN; {self.remedy}"
            )
        if status is Status.DIVERGED:
            return (
                f"diverged after {count} iterations: x0 or the loss there is NaN or Inf, or a step "
                "left the region where the model is defined; check x0 and what the loss is made "
                "of, lower step_size or add a constraint"
            )
        return describe(
            status,
            residual=float(self.residual[problem]),
            iterations=count,
            tolerance=self.tolerance,
            epsilon=torch.finfo(self.x.dtype).eps,
            remedy="raise iterations or the tolerance, or lower step_size",
        )

    def summary(self) -> str:
        """One line on all problems, with the remedy for the worst of them."""
        total, done = self.status.numel(), int(self.converged.sum())
        worst = int(torch.argmax(self.status))
        tail = "" if done == total else f"; problem {worst}: {self.message(worst)}"
        return (
            f"{done} of {total} inputs converged ({self.engine}); mean loss "
            f"{float(self.initial_loss.nanmean()):.4g} → {float(self.loss.nanmean()):.4g} in "
            f"{self.evaluations} evaluations of the map and {self.vjps} pull-backs{tail}"
        )
