"""The loop that runs an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.engines.base import Engine
from equilibria.inputs.fallback import SolveFallback
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem
from equilibria.inputs.steps import Steps
from equilibria.solvers import Status
from equilibria.solvers.convergence import DIVERGENCE_FACTOR, final_status


@dataclass(frozen=True)
class SearchResult:
    """Result of a search; tensors have one entry or row per problem.

    Attributes:
        last: Last iterate.
        candidates: Inputs that the engine offers as results, the preferred ones first.
        unchecked: Input x and state z that the engine returns if no true losses are computed.
        first_loss: Loss at x0 with the z of the first iteration.
        scale: Factor of the loss, which makes the adjoint μ of the order of 1.
        status: `Status` codes.
        iterations: Numbers of steps of x.
        visited: One of the iterates, drawn uniformly, if requested.
        diverging: Mask of the problems whose updates of z and μ diverged, so that these were solved
            for.
    """

    last: JointIterate
    candidates: list[Tensor]
    unchecked: tuple[Tensor, Tensor]
    first_loss: Tensor
    scale: Tensor
    status: Tensor
    iterations: Tensor
    visited: JointIterate | None
    diverging: Tensor

    @property
    def converged(self) -> Tensor:
        return self.status == int(Status.CONVERGED)


@dataclass
class Search:
    """Search that runs an engine until every problem converges, diverges or reaches the limit.

    Attributes:
        problem: The problems.
        engine: The engine.
        steps: Step rule of the input x.
        sweeps: Number of updates of equilibrium z and adjoint μ per step of x.
        tolerance: Relative residual of z, μ and x at which a problem has converged.
        solve_tolerance: Relative residual of the solves for z and μ if sweeps diverge.
        visit: Whether to keep one of the iterates, drawn by torch's global generator.
    """

    problem: InputProblem
    engine: Engine
    steps: Steps
    sweeps: int
    tolerance: float
    solve_tolerance: float
    visit: bool = False

    def run(self, x: Tensor, z: Tensor | None, iterations: int) -> SearchResult:
        """Run the search.

        Args:
            x: Inputs to start from, flat, one row per problem.
            z: Equilibrium at x, one row per sample; None solves for it.
            iterations: Largest number of steps of x.
        """
        problem, groups = self.problem, self.problem.groups
        scale = None if self.engine.unit_loss else torch.ones_like(x[:, 0])
        fixed = FixedInput(problem, x, scale)
        method = self.engine.begin(problem, self.sweeps)
        z = method.start(fixed, z)
        current = JointIterate(z, torch.zeros_like(z), x)
        running = torch.ones(groups.problems, dtype=torch.bool, device=x.device)
        converged, diverged = ~running, ~running
        taken = torch.zeros(groups.problems, dtype=torch.int64, device=x.device)
        selection = method.selection(x, z)
        largest = groups.norm(z)
        visited = None
        fallback = SolveFallback(problem, method, x, self.solve_tolerance)
        for iteration in range(iterations):
            if self.visit and float(torch.rand(())) * (iteration + 1) < 1:
                visited = current
            if iteration:
                fixed = FixedInput(problem, current.x, scale)
            previous = fallback.rows
            updated, evaluation = fallback.update(fixed, current, running=running, largest=largest)
            if fallback.rows is not previous:
                restarted = fallback.rows & ~previous
                current = JointIterate(current.z, current.mu, updated.x)
                selection.restart(restarted)
                self.steps.restart(restarted, evaluation.gradient)
            if iteration == 0:
                first_loss, scale = evaluation.loss, fixed.scale
            assert scale is not None
            taken += running
            size = groups.norm(updated.z)
            largest = torch.where(largest > 0, largest, size)
            finite = evaluation.finite & (size <= DIVERGENCE_FACTOR * largest)
            usable = running & finite
            selection.observe(current, updated, evaluation, usable=usable, solved=fallback.rows)
            lag = torch.maximum(evaluation.state_residual, evaluation.adjoint_residual)
            residual = lag
            if bool((lag <= max(self.tolerance, method.residual_limit)).any()):
                # Elsewhere the residual of z and μ alone is above all limits.
                of_x = self.steps.residual(current.x, evaluation.gradient, scale)
                residual = torch.maximum(lag, of_x)
            diverged |= running & ~finite
            converged |= running & finite & (residual <= self.tolerance)
            running = ~(diverged | converged)
            moved = self.steps.move(current.x, evaluation.gradient, scale, lag=lag, running=running)
            # A converged problem keeps its x and takes the latest z and μ.
            updated.x = torch.where(running[:, None], moved, current.x)
            updated = current.where(diverged, updated, groups)
            if iteration == iterations - 1 or not bool(running.any()):
                current = updated
                break
            ahead = method.extrapolated(current, updated, residual)
            current = ahead.where(running, updated, groups)
        assert scale is not None
        current.x = problem.region.project(current.x)
        status = final_status(converged, ~diverged)
        return SearchResult(
            last=current,
            candidates=selection.candidates(current, converged),
            unchecked=selection.unchecked(current),
            first_loss=first_loss,
            scale=scale,
            status=status,
            iterations=taken,
            visited=visited,
            diverging=fallback.rows,
        )
