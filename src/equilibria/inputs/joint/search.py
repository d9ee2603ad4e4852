"""The one loop that every engine runs in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.joint.engines import Engine
from equilibria.inputs.joint.members import Members
from equilibria.inputs.joint.problem import InputProblem, Reading, Site
from equilibria.inputs.joint.secants import Secants
from equilibria.inputs.joint.steps import Steps
from equilibria.solvers import Status

SMALL_RESIDUAL = 1e-2
"""An iterate whose z is further than this (relative) from T(z; x) says nothing of its loss."""
FIRST_PULLS = 3
"""More pull-backs for the first μ than for every later one."""
START_TOLERANCE = 0.1
"""Of the first z, where no check has solved for it: the sweeps go on from there."""
DIVERGENCE_FACTOR = 1e6
"""A z this many times larger than the first one has diverged."""


@dataclass
class Iterate:
    """z and μ, one row a sample, and x, one row a problem."""

    z: Tensor
    mu: Tensor
    x: Tensor


@dataclass(frozen=True)
class Found:
    """Where the search ended, problem by problem."""

    last: Iterate
    best_x: Tensor
    """The x of the lowest loss among iterates with a small z-residual; the start if none had."""
    first_loss: Tensor
    """At x0, with the z of the first iteration."""
    scale: Tensor
    """What the loss was multiplied by, so that μ is of the order of 1."""
    status: Tensor
    iterations: Tensor
    steps: Steps


class Search:
    """Runs an engine until every problem has converged, diverged or run out of iterations."""

    def __init__(
        self, problem: InputProblem, engine: Engine, steps: Steps, *, sweeps: int, tolerance: float
    ) -> None:
        self.problem = problem
        self.engine = engine
        self.steps = steps
        self.sweeps = engine.sweeps or sweeps
        self.tolerance = tolerance
        self.members = problem.members

    def run(self, x: Tensor, z: Tensor | None, iterations: int) -> Found:
        """Search from x; `z` is its equilibrium, or None where that is still to be found."""
        problem, members = self.problem, self.members
        count = members.problems
        site = problem.at(x, torch.ones_like(x[:, 0]))
        z = self._start(site, z)
        self.scale = site.scale = site.unit_scale(z)
        now = Iterate(z, torch.zeros_like(z), x)
        status = x.new_full((count,), int(Status.OUT_OF_ITERATIONS), dtype=torch.int8)
        running = torch.ones(count, dtype=torch.bool, device=x.device)
        taken = torch.zeros(count, dtype=torch.int64, device=x.device)
        best_x, best_loss = x, x.new_full((count,), torch.inf)
        largest = members.norm(z)
        memory: Any = None
        raw: Tensor | None = None
        secants = Secants(self.engine.secants) if self.engine.secants else None
        for iteration in range(iterations):
            if iteration:
                site = problem.at(now.x, self.scale)
            updated, reading, residual = self._follow(site, now, first=iteration == 0)
            if iteration == 0:
                first_loss = reading.loss
            taken += running
            size = members.norm(updated.z)
            largest = torch.where(largest > 0, largest, size)
            finite = _finite(reading, members) & (size <= DIVERGENCE_FACTOR * largest)
            good = running & finite & (residual[0] <= SMALL_RESIDUAL) & (reading.loss < best_loss)
            best_x = torch.where(good[:, None], now.x, best_x)
            best_loss = torch.where(good, reading.loss, best_loss)
            lag = torch.maximum(*residual)
            worst = self._worst(lag, now.x, reading.gradient)
            converged = running & finite & (worst <= self.tolerance)
            status[running & ~finite] = int(Status.DIVERGED)
            status[converged] = int(Status.CONVERGED)
            going = running & finite & ~converged
            moved = self.steps.move(now.x, reading.gradient, self.scale, lag=lag, running=going)
            # A problem that has converged keeps its x and takes the freshest z and μ.
            updated.x = torch.where(going[:, None], moved, now.x)
            running = going
            updated = self._where(status == int(Status.DIVERGED), now, updated)
            if iteration == iterations - 1 or not bool(running.any()):
                now = updated
                break
            if self.engine.mixing is not None:
                point = self._joined(now) if raw is None else raw
                image = self._joined(updated)
                if memory is None:
                    memory = self.engine.mixing.begin(point)
                proposed = self.engine.mixing.propose(memory, point, image, image - point)
                mixed = self._parted(proposed)
                raw = None if self.engine.project_mixed else proposed
                mixed.x = problem.region.project(mixed.x)
                if self.engine.project_mixed:
                    mixed = self._where(worst <= self.engine.mix_below, mixed, updated)
            elif secants is not None:
                mixed = self._predicted(secants, now.x, updated)
            else:
                mixed = updated
            now = self._where(running, mixed, updated)
        return Found(now, best_x, first_loss, self.scale, status, taken, self.steps)

    def _start(self, site: Site, z: Tensor | None) -> Tensor:
        """Where z starts: solved loosely, unless a solve follows or the engine wants zero."""
        if self.engine.from_zero or (z is None and self.engine.inference != "sweeps"):
            return self.problem.zeros()
        if z is not None:
            return z
        return self.problem.solve_at(site.context, None, tolerance=START_TOLERANCE)[0]

    def _follow(
        self, site: Site, now: Iterate, *, first: bool
    ) -> tuple[Iterate, Reading, tuple[Tensor, Tensor]]:
        """z and μ brought up to date at x, the last evaluation, and the residuals of z and μ."""
        if self.engine.inference == "sweeps":
            return self._sweep(site, now, first=first)
        return self._solve(site, now)

    def _sweep(
        self, site: Site, now: Iterate, *, first: bool
    ) -> tuple[Iterate, Reading, tuple[Tensor, Tensor]]:
        """z first, without a graph; then μ, through the graph of the last evaluation alone."""
        z, mu = now.z, now.mu
        alpha_z, alpha_mu = self.engine.alpha_z, self.engine.alpha_mu
        z = self._advanced(site.image, z, self.sweeps - 1, alpha_z)
        here = site.linearize(z)
        pulls = self.sweeps - 1
        if first and not self.engine.from_zero:
            # z is an equilibrium here, so μ can be had as well: the first step sets the course.
            mu, pulls = here.slope, pulls + FIRST_PULLS
        mu = self._advanced(here.pull, mu, pulls, alpha_mu)
        reading = here.reading(mu)
        residual = self._residual(z, reading.image), self._residual(mu, reading.adjoint)
        z = _towards(z, reading.image, alpha_z)
        mu = _towards(mu, reading.adjoint, alpha_mu)
        return Iterate(z, mu, now.x), reading, residual

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

    def _solve(self, site: Site, now: Iterate) -> tuple[Iterate, Reading, tuple[Tensor, Tensor]]:
        warm = self.engine.inference == "warm"
        tolerance = self.engine.inner_tolerance
        limit = self.engine.inner_iterations
        z, _ = self.problem.solve_at(
            site.context, now.z if warm else None, tolerance=tolerance, max_iterations=limit
        )
        here = site.linearize(z)
        start = now.mu if warm else None
        mu = here.solve_adjoint(start, tolerance=tolerance, max_iterations=limit or 200).value
        reading = here.reading(mu)
        residual = self._residual(z, reading.image), self._residual(mu, reading.adjoint)
        return Iterate(z, mu, now.x), reading, residual

    def _predicted(self, secants: Secants, x: Tensor, updated: Iterate) -> Iterate:
        """`updated`, whose x has moved on from `x`, with z and μ moved along."""
        join, part = self.members.join, self.members.part
        secants.observe(x, (join(updated.z), join(updated.mu)))
        z, mu = secants.predict(updated.x)
        return Iterate(part(z), part(mu), updated.x)

    def _worst(self, lag: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        """The largest residual of each problem where it matters: below a limit or not."""
        limit = self.tolerance
        if self.engine.mixing is not None:
            limit = max(limit, self.engine.mix_below)
        if not bool((lag <= limit).any()):
            # Far from any limit already: the step that tells of x's residual can be saved.
            return lag
        return torch.maximum(lag, self.steps.residual(x, gradient, self.scale))

    def _residual(self, point: Tensor, image: Tensor) -> Tensor:
        return relative_residual(self.problem, point, image)

    def _joined(self, iterate: Iterate) -> Tensor:
        join = self.members.join
        return torch.cat([join(iterate.z), join(iterate.mu), iterate.x], dim=1)

    def _parted(self, joined: Tensor) -> Iterate:
        inputs = math.prod(self.problem.input_shape[1:])
        states = (joined.shape[1] - inputs) // 2
        z, mu, x = torch.split(joined, [states, states, inputs], dim=1)
        return Iterate(self.members.part(z), self.members.part(mu), x)

    def _where(self, rows: Tensor, one: Iterate, other: Iterate) -> Iterate:
        # All rows or none is the rule, and choosing among them copies everything.
        if bool(rows.all()):
            return one
        if not bool(rows.any()):
            return other
        samples = self.members.spread(rows)[:, None]
        return Iterate(
            torch.where(samples, one.z, other.z),
            torch.where(samples, one.mu, other.mu),
            torch.where(rows[:, None], one.x, other.x),
        )


def relative_residual(problem: InputProblem, point: Tensor, image: Tensor) -> Tensor:
    """‖image − point‖/‖image‖ of each problem; NaN counts as infinite."""
    change, size = problem.members.norm(image - point), problem.members.norm(image)
    relative = torch.where(change > 0, change / size, change)
    return relative.nan_to_num(nan=torch.inf)


def _towards(point: Tensor, image: Tensor, alpha: float) -> Tensor:
    return image if alpha == 1 else torch.lerp(point, image, alpha)


def _finite(reading: Reading, members: Members) -> Tensor:
    """A sum of numbers is one only if all are; it may also overflow, which is as bad."""
    rows = reading.image.abs().sum(dim=1) + reading.adjoint.abs().sum(dim=1)
    inputs = reading.gradient.abs().sum(dim=1) + reading.loss
    return torch.isfinite(members.worst(rows) + inputs)
