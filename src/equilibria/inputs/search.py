"""The one loop that every engine runs in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.engines.base import Engine
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem
from equilibria.inputs.steep import Steep
from equilibria.inputs.steps import Steps
from equilibria.solvers import Status
from equilibria.solvers.convergence import DIVERGENCE_FACTOR, final_status


@dataclass(frozen=True)
class SearchResult:
    """Where the search ended, problem by problem."""

    last: JointIterate
    candidates: list[Tensor]
    """Inputs that the engine offers as results, the preferred ones first."""
    unchecked: tuple[Tensor, Tensor]
    """The (x, z) that the engine returns where no true losses are computed."""
    first_loss: Tensor
    """At x0, with the z of the first iteration."""
    scale: Tensor
    """What the loss was multiplied by, so that μ is of the order of 1."""
    status: Tensor
    iterations: Tensor
    visited: JointIterate | None
    """One of the iterates, each as likely, if that was asked for."""
    steep: Tensor
    """Problems whose sweeps diverged, so that z and μ were solved for."""

    @property
    def converged(self) -> Tensor:
        return self.status == int(Status.CONVERGED)


@dataclass
class Search:
    """Runs an engine until every problem has converged, diverged or run out of iterations."""

    problem: InputProblem
    engine: Engine
    steps: Steps
    sweeps: int
    tolerance: float
    solve_tolerance: float
    """Relative residual of z and μ where they are solved for because sweeps diverge."""
    visit: bool = False
    """Whether one of the iterates is kept, drawn by torch's own generator."""

    def run(self, x: Tensor, z: Tensor | None, iterations: int) -> SearchResult:
        """Search from x; `z` is its equilibrium, or None where that is still to be found."""
        problem, groups = self.problem, self.problem.groups
        scale = None if self.engine.unit_loss else torch.ones_like(x[:, 0])
        here = FixedInput(problem, x, scale)
        method = self.engine.begin(problem, self.sweeps)
        z = method.start(here, z)
        now = JointIterate(z, torch.zeros_like(z), x)
        running = torch.ones(groups.problems, dtype=torch.bool, device=x.device)
        converged, diverged = ~running, ~running
        taken = torch.zeros(groups.problems, dtype=torch.int64, device=x.device)
        selection = method.selection(x, z)
        largest = groups.norm(z)
        visited = None
        steep = Steep(problem, method, x, self.solve_tolerance)
        for iteration in range(iterations):
            if self.visit and float(torch.rand(())) * (iteration + 1) < 1:
                visited = now
            if iteration:
                here = FixedInput(problem, now.x, scale)
            before = steep.rows
            updated, evaluation = steep.follow(here, now, running=running, largest=largest)
            if steep.rows is not before:
                over = steep.rows & ~before
                now = JointIterate(now.z, now.mu, updated.x)
                selection.restart(over)
                self.steps.restart(over, evaluation.gradient)
            if iteration == 0:
                first_loss, scale = evaluation.loss, here.scale
            assert scale is not None
            taken += running
            size = groups.norm(updated.z)
            largest = torch.where(largest > 0, largest, size)
            finite = evaluation.finite & (size <= DIVERGENCE_FACTOR * largest)
            usable = running & finite
            selection.observe(now, updated, evaluation, usable=usable, solved=steep.rows)
            lag = torch.maximum(evaluation.state_residual, evaluation.adjoint_residual)
            residual = lag
            if bool((lag <= max(self.tolerance, method.residual_limit)).any()):
                # Otherwise it is far from any limit: the step that tells of x's can be saved.
                left = self.steps.residual(now.x, evaluation.gradient, scale)
                residual = torch.maximum(lag, left)
            diverged |= running & ~finite
            converged |= running & finite & (residual <= self.tolerance)
            running = ~(diverged | converged)
            moved = self.steps.move(now.x, evaluation.gradient, scale, lag=lag, running=running)
            # A problem that has converged keeps its x and takes the freshest z and μ.
            updated.x = torch.where(running[:, None], moved, now.x)
            updated = now.where(diverged, updated, groups)
            if iteration == iterations - 1 or not bool(running.any()):
                now = updated
                break
            ahead = method.extrapolated(now, updated, residual)
            now = ahead.where(running, updated, groups)
        assert scale is not None
        now.x = problem.region.project(now.x)
        status = final_status(converged, ~diverged)
        return SearchResult(
            last=now,
            candidates=selection.candidates(now, converged),
            unchecked=selection.unchecked(now),
            first_loss=first_loss,
            scale=scale,
            status=status,
            iterations=taken,
            visited=visited,
            steep=steep.rows,
        )
