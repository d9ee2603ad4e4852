"""The one loop that every engine runs in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.joint.engines import Engine
from equilibria.joint.problem import InputProblem, Reading
from equilibria.joint.steps import Steps
from equilibria.solvers import Status

SMALL_RESIDUAL = 1e-2
"""An iterate whose z is further than this (relative) from T(z; x) says nothing of its loss."""
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

    def run(self, x: Tensor, z: Tensor, iterations: int) -> Found:
        problem, members = self.problem, self.members
        count = members.problems
        self.scale = self._loss_scale(x, z)
        now = Iterate(z, torch.zeros_like(z), x)
        status = x.new_full((count,), int(Status.OUT_OF_ITERATIONS), dtype=torch.int8)
        running = torch.ones(count, dtype=torch.bool, device=x.device)
        taken = torch.zeros(count, dtype=torch.int64, device=x.device)
        best_x, best_loss = x, x.new_full((count,), torch.inf)
        largest = members.norm(z)
        memory: Any = None
        raw: Tensor | None = None
        for iteration in range(iterations):
            updated, reading, residual = self._follow(now)
            assert reading.gradient is not None
            taken += running
            size = members.norm(updated.z)
            largest = torch.where(largest > 0, largest, size)
            finite = _finite(reading, members) & (size <= DIVERGENCE_FACTOR * largest)
            good = running & finite & (residual[0] <= SMALL_RESIDUAL) & (reading.loss < best_loss)
            best_x = torch.where(good[:, None], now.x, best_x)
            best_loss = torch.where(good, reading.loss, best_loss)
            stationarity = self.steps.residual(now.x, reading.gradient, self.scale)
            worst = torch.stack([*residual, stationarity]).amax(dim=0)
            converged = running & finite & (worst <= self.tolerance)
            status[running & ~finite] = int(Status.DIVERGED)
            status[converged] = int(Status.CONVERGED)
            going = running & finite & ~converged
            lag = torch.maximum(*residual)
            moved = self.steps.move(now.x, reading.gradient, self.scale, lag=lag, running=going)
            # A problem that has converged keeps its x and takes the freshest z and μ.
            updated.x = torch.where(going[:, None], moved, now.x)
            running = going
            updated = self._where(status == int(Status.DIVERGED), now, updated)
            if iteration == iterations - 1 or not bool(running.any()):
                now = updated
                break
            point = self._joined(now) if raw is None else raw
            image = self._joined(updated)
            if self.engine.mixing is not None:
                if memory is None:
                    memory = self.engine.mixing.begin(point)
                proposed = self.engine.mixing.propose(memory, point, image, image - point)
                mixed = self._parted(proposed)
                raw = None if self.engine.project_mixed else proposed
                mixed.x = problem.region.project(mixed.x)
                if self.engine.project_mixed:
                    mixed = self._where(worst <= self.engine.mix_below, mixed, updated)
            else:
                mixed = updated
            now = self._where(running, mixed, updated)
        return Found(now, best_x, self.scale, status, taken, self.steps)

    def _loss_scale(self, x: Tensor, z: Tensor) -> Tensor:
        """1/‖∂ℓ/∂z‖ at the start: type-I mixing weighs μ against z, whatever the loss's unit."""
        ones = torch.ones_like(x[:, 0])
        reading = self.problem.at(x, ones).evaluate(z, torch.zeros_like(z), gradient=False)
        size = self.members.norm(reading.adjoint)
        usable = (size > 0) & torch.isfinite(size)
        return torch.where(usable, 1 / torch.where(usable, size, 1.0), 1.0)

    def _follow(self, now: Iterate) -> tuple[Iterate, Reading, tuple[Tensor, Tensor]]:
        """z and μ brought up to date at x, the last evaluation, and the residuals of z and μ."""
        if self.engine.inference == "sweeps":
            return self._sweep(now)
        return self._solve(now)

    def _sweep(self, now: Iterate) -> tuple[Iterate, Reading, tuple[Tensor, Tensor]]:
        site = self.problem.at(now.x, self.scale)
        z, mu = now.z, now.mu
        for sweep in range(self.sweeps):
            reading = site.evaluate(z, mu, gradient=sweep == self.sweeps - 1)
            residual = self._residual(z, reading.image), self._residual(mu, reading.adjoint)
            z = z + self.engine.alpha_z * (reading.image - z)
            mu = mu + self.engine.alpha_mu * (reading.adjoint - mu)
        return Iterate(z, mu, now.x), reading, residual

    def _solve(self, now: Iterate) -> tuple[Iterate, Reading, tuple[Tensor, Tensor]]:
        warm = self.engine.inference == "warm"
        tolerance = self.engine.inner_tolerance
        z, _ = self.problem.solve(now.x, now.z if warm else None, tolerance=tolerance, check=False)
        site = self.problem.at(now.x, self.scale)
        mu = site.solve_adjoint(z, now.mu if warm else None, tolerance=tolerance).value
        reading = self.problem.at(now.x, self.scale).evaluate(z, mu, gradient=True)
        residual = self._residual(z, reading.image), self._residual(mu, reading.adjoint)
        return Iterate(z, mu, now.x), reading, residual

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


def _finite(reading: Reading, members: Any) -> Tensor:
    assert reading.gradient is not None
    rows = torch.isfinite(reading.image).all(dim=1) & torch.isfinite(reading.adjoint).all(dim=1)
    samples = members.worst((~rows).to(reading.image.dtype)) == 0
    finite: Tensor = (
        samples & torch.isfinite(reading.gradient).all(dim=1) & torch.isfinite(reading.loss)
    )
    return finite
