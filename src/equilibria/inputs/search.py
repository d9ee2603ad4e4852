"""The one loop that every engine runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.engines import Engine
from equilibria.inputs.problem import Evaluation, FixedInput, InputProblem, Linearization
from equilibria.inputs.steps import Secants, Steps
from equilibria.solvers import Status
from equilibria.solvers.convergence import DIVERGENCE_FACTOR, final_status

SMALL_RESIDUAL = 1e-2
"""An iterate whose z is further than this (relative) from T(z; x) says nothing of its loss."""
FIRST_PULLS = 3
"""More pull-backs for the first μ than for every later one."""
START_TOLERANCE = 0.1
"""Of the first z, where no check has solved for it: the sweeps go on from there."""


@dataclass
class JointIterate:
    """z and μ, one row a sample, and x, one row a problem."""

    z: Tensor
    mu: Tensor
    x: Tensor


@dataclass(frozen=True)
class SearchResult:
    """Where the search ended, problem by problem."""

    last: JointIterate
    best_x: Tensor
    """The x of the lowest loss among iterates with a small z-residual; the start if none had."""
    best_z: Tensor
    """The z that went with it, where the engine believes every iterate; otherwise the first."""
    first_loss: Tensor
    """At x0, with the z of the first iteration."""
    scale: Tensor
    """What the loss was multiplied by, so that μ is of the order of 1."""
    status: Tensor
    iterations: Tensor
    visited: JointIterate | None
    """One of the iterates, each as likely, if that was asked for."""

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
    visit: bool = False
    """Whether one of the iterates is kept, drawn by torch's own generator."""

    def __post_init__(self) -> None:
        self.groups = self.problem.groups
        self.secants = Secants(self.engine.secants) if self.engine.secants else None
        self.memory: Any = None
        """The mixing solver's."""
        self.mixed: Tensor | None = None
        """The joint iterate as the mixing solver proposed it, where it is not projected."""

    def run(self, x: Tensor, z: Tensor | None, iterations: int) -> SearchResult:
        """Search from x; `z` is its equilibrium, or None where that is still to be found."""
        problem, groups = self.problem, self.groups
        here = FixedInput(problem, x, torch.ones_like(x[:, 0]))
        z = self._start(here, z)
        if self.engine.unit_loss:
            here.scale = here.unit_scale(z)
        scale = here.scale
        now = JointIterate(z, torch.zeros_like(z), x)
        running = torch.ones(groups.problems, dtype=torch.bool, device=x.device)
        converged, diverged = ~running, ~running
        taken = torch.zeros(groups.problems, dtype=torch.int64, device=x.device)
        best_x, best_z, best_loss = x, z, x.new_full((groups.problems,), torch.inf)
        believed = torch.inf if self.engine.cheapest else SMALL_RESIDUAL
        largest = groups.norm(z)
        follow = self._sweep if self.engine.inference == "sweeps" else self._solve
        visited = None
        for iteration in range(iterations):
            if self.visit and float(torch.rand(())) * (iteration + 1) < 1:
                visited = now
            if iteration:
                here = FixedInput(problem, now.x, scale)
            updated, evaluation = follow(here, now, first=iteration == 0)
            if iteration == 0:
                first_loss = evaluation.loss
            taken += running
            size = groups.norm(updated.z)
            largest = torch.where(largest > 0, largest, size)
            finite = evaluation.finite & (size <= DIVERGENCE_FACTOR * largest)
            sound = running & finite & (evaluation.state_residual <= believed)
            better = sound & (evaluation.loss < best_loss)
            best_x = torch.where(better[:, None], now.x, best_x)
            best_loss = torch.where(better, evaluation.loss, best_loss)
            if self.engine.cheapest:
                best_z = torch.where(groups.to_samples(better)[:, None], now.z, best_z)
            lag = torch.maximum(evaluation.state_residual, evaluation.adjoint_residual)
            residual = self._residual(lag, now.x, evaluation.gradient, scale)
            diverged |= running & ~finite
            converged |= running & finite & (residual <= self.tolerance)
            running = ~(diverged | converged)
            moved = self.steps.move(now.x, evaluation.gradient, scale, lag=lag, running=running)
            # A problem that has converged keeps its x and takes the freshest z and μ.
            updated.x = torch.where(running[:, None], moved, now.x)
            updated = self._where(diverged, now, updated)
            if iteration == iterations - 1 or not bool(running.any()):
                now = updated
                break
            now = self._where(running, self._extrapolated(now, updated, residual), updated)
        status = final_status(converged, ~diverged)
        return SearchResult(now, best_x, best_z, first_loss, scale, status, taken, visited)

    def _start(self, here: FixedInput, z: Tensor | None) -> Tensor:
        """Where z starts: solved loosely, unless a solve follows or the engine wants zero."""
        if self.engine.from_zero or (z is None and self.engine.inference != "sweeps"):
            return self.problem.packing.pack(self.problem.zero_state)
        if z is not None:
            return z
        return self._solved(here, None, START_TOLERANCE)

    def _solved(
        self, here: FixedInput, start: Tensor | None, tolerance: float, limit: int | None = None
    ) -> Tensor:
        found = self.problem.solve(here.context, start, tolerance=tolerance, max_iterations=limit)
        self.problem.evaluations += found.evaluations
        return self.problem.packing.pack(found.state)

    def _sweep(
        self, here: FixedInput, now: JointIterate, *, first: bool
    ) -> tuple[JointIterate, Evaluation]:
        """z and μ brought up to date at x, and the last evaluation.

        z first, without a graph; then μ, through the graph of the last evaluation alone.
        """
        alpha_z, alpha_mu = self.engine.alpha_z, self.engine.alpha_mu
        z = self._advanced(here.image, now.z, self.sweeps - 1, alpha_z)
        linear = Linearization(here, z)
        mu, pulls = now.mu, self.sweeps - 1
        if first and not self.engine.from_zero:
            # z is an equilibrium here, so μ can be had as well: the first step sets the course.
            mu, pulls = linear.slope, pulls + FIRST_PULLS
        mu = self._advanced(linear.pull, mu, pulls, alpha_mu)
        evaluation = linear.evaluation(mu)
        z = _towards(z, evaluation.image, alpha_z)
        mu = _towards(mu, evaluation.adjoint, alpha_mu)
        return JointIterate(z, mu, now.x), evaluation

    def _advanced(
        self, image_of: Callable[[Tensor], Tensor], point: Tensor, times: int, alpha: float
    ) -> Tensor:
        """`point` after so many applications of a map, accelerated or damped."""
        inner = self.engine.inner
        memory: Any = None if inner is None or times < 1 else inner.begin(point)
        for _ in range(times):
            image = image_of(point)
            point = (
                _towards(point, image, alpha)
                if inner is None
                else inner.propose(memory, point, image, image - point)
            )
        return point

    def _solve(
        self, here: FixedInput, now: JointIterate, *, first: bool
    ) -> tuple[JointIterate, Evaluation]:
        """z and μ solved anew at x, from nothing or from where they were."""
        warm = self.engine.inference == "warm"
        tolerance, limit = self.engine.inner_tolerance, self.engine.inner_iterations
        z = self._solved(here, now.z if warm else None, tolerance, limit)
        linear = Linearization(here, z)
        start = now.mu if warm else None
        mu = linear.solve_adjoint(start, tolerance=tolerance, max_iterations=limit or 200).value
        return JointIterate(z, mu, now.x), linear.evaluation(mu)

    def _residual(self, lag: Tensor, x: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
        """The largest residual of each problem where it matters: below a limit or not."""
        limit = self.tolerance
        if self.engine.mixing is not None:
            limit = max(limit, self.engine.mix_below)
        if not bool((lag <= limit).any()):
            # Far from any limit already: the step that tells of x's residual can be saved.
            return lag
        return torch.maximum(lag, self.steps.residual(x, gradient, scale))

    def _extrapolated(
        self, now: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        """Where the next iteration starts: mixed with earlier iterates, or predicted from them."""
        mixing, groups = self.engine.mixing, self.groups
        if self.secants is not None and mixing is None:
            self.secants.observe(now.x, (groups.join(updated.z), groups.join(updated.mu)))
            z, mu = self.secants.predict(updated.x)
            return JointIterate(groups.split(z), groups.split(mu), updated.x)
        if mixing is None:
            return updated
        point = groups.join_all(now.z, now.mu, now.x) if self.mixed is None else self.mixed
        image = groups.join_all(updated.z, updated.mu, updated.x)
        if self.memory is None:
            self.memory = mixing.begin(point)
        proposed = mixing.propose(self.memory, point, image, image - point)
        z, mu, x = groups.split_all(proposed, now.x.shape[1])
        mixed = JointIterate(z, mu, self.problem.region.project(x))
        if not self.engine.project_mixed:
            self.mixed = proposed
            return mixed
        return self._where(residual <= self.engine.mix_below, mixed, updated)

    def _where(self, rows: Tensor, one: JointIterate, other: JointIterate) -> JointIterate:
        # All rows or none is the rule, and choosing among them copies everything.
        if bool(rows.all()):
            return one
        if not bool(rows.any()):
            return other
        samples = self.groups.to_samples(rows)[:, None]
        return JointIterate(
            torch.where(samples, one.z, other.z),
            torch.where(samples, one.mu, other.mu),
            torch.where(rows[:, None], one.x, other.x),
        )


def _towards(point: Tensor, image: Tensor, alpha: float) -> Tensor:
    return image if alpha == 1 else torch.lerp(point, image, alpha)
