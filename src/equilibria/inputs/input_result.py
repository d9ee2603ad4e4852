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

    A problem is one row of x0 with its samples. With `verify` the losses are computed at
    equilibria that are solved to a tight tolerance after the search.

    Attributes:
        x: Optimized inputs, in the shape of x0. They satisfy the constraint exactly.
        state: z*, the equilibrium at x.
        adjoint: μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z at x, with J = ∂T/∂z for the layer's map T, and the loss ℓ;
            the μ of the search if `polish=False`.
        loss: Loss of each problem at the equilibrium of x; NaN where the solve for it failed.
        initial_loss: Loss of each problem at the equilibrium of x0; NaN where the solve failed.
        status: `Status` code of each problem.
        state_residual: ‖T(z; x) − z‖/‖T(z; x)‖ of each problem, or the residual of the solve for z
            if that is smaller.
        adjoint_residual: ‖Jᵀμ + ∂ℓ/∂z − μ‖/‖Jᵀμ + ∂ℓ/∂z‖ of each problem, or the residual of the
            solve for μ if that is smaller.
        input_residual: Length of a step of x of each problem, after projection to the constraint,
            relative to the size of the constraint (of x0 if there is none).
        iterations: Number of steps of x of each problem.
        evaluations: Calls of T in the search, each for the whole batch.
        vjps: Vector-Jacobian products with T in the search and for μ.
        check_evaluations: Calls of T for the true losses before and after the search.
        engine: Name of the engine.
        tolerance: Relative residual at which a problem has converged.
        problem: The problem that was solved; `optimal_value` and `optimal_input` use it.
        visited: One of the pairs (x, z) of the search, drawn uniformly, if `visit` was set.
        remedy: What to do about problems without a loss.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> result = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=5)
        >>> result.x.shape, result.iterations
        (torch.Size([1, 1, 8, 8]), tensor([5]))
    """

    x: Tensor
    state: State
    adjoint: State
    loss: Tensor
    initial_loss: Tensor
    status: Tensor
    state_residual: Tensor
    adjoint_residual: Tensor
    input_residual: Tensor
    iterations: Tensor
    evaluations: int
    vjps: int
    check_evaluations: int
    engine: str
    tolerance: float
    problem: InputProblem = field(repr=False)
    visited: tuple[Tensor, State] | None = None
    remedy: str = ""

    @property
    def converged(self) -> Tensor:
        """Whether each problem converged, shape (problems,)."""
        return self.status == int(Status.CONVERGED)

    @property
    def residual(self) -> Tensor:
        """Largest of the three residuals of each problem, shape (problems,)."""
        kinds = (self.state_residual, self.adjoint_residual, self.input_residual)
        return torch.stack(kinds).amax(dim=0)

    def report_visited(self, model: nn.Module | None = None) -> None:
        """Report the visited input and state to `solving` blocks, for a Jacobian penalty there.

        See JIIO's Eq. 27.

        Args:
            model: Model whose parameters the penalty reaches; by default the model of the search.
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
        """Return a sentence on how one problem ended, with the remedy.

        Args:
            problem: Index of the problem.
        """
        status, count = Status(int(self.status[problem])), int(self.iterations[problem])
        unsolved = not float(self.state_residual[problem]) <= SMALL_RESIDUAL
        if self.remedy and unsolved and bool(self.loss[problem].isnan()):
            return (
                "the loss is NaN, because the solve for the equilibrium ended at a relative "
                f"residual of {float(self.state_residual[problem]):.1e}; {self.remedy}"
            )
        if status is Status.DIVERGED:
            return (
                f"diverged after {count} iterations: x0 or its loss is NaN or Inf, or a step left "
                "the region where the model is defined; check x0 and the loss function, lower "
                "step_size, or add a constraint"
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
        """Return one line on the search: converged inputs, mean loss, cost, and the worst input.

        For the worst input that did not converge, the line says how its search ended and what to
        do.
        """
        total, done = self.status.numel(), int(self.converged.sum())
        worst = int(torch.argmax(self.status))
        tail = "" if done == total else f"; problem {worst}: {self.message(worst)}"
        return (
            f"{done} of {total} inputs converged ({self.engine}); mean loss "
            f"{float(self.initial_loss.nanmean()):.4g} → {float(self.loss.nanmean()):.4g} in "
            f"{self.evaluations} evaluations of the map and {self.vjps} vector-Jacobian products"
            f"{tail}"
        )
