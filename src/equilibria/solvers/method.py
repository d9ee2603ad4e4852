"""Base class of all methods that compute an equilibrium: settings, start, and the minimum check.

A `Solver` iterates the map (`base.py`); a `Minimizer` descends on the hidden objective
(`minimize/`). Layers, gradient rules and searches use any `Method`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.registry import check_at_least_one, check_tolerances
from equilibria.solvers.convergence import RelativeResidual, StoppingCriterion, finest_tolerance
from equilibria.solvers.minima import at_minima
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status

if TYPE_CHECKING:
    from equilibria.solvers.minimize.base import Minimizer

DESCENT_BUDGET = 100
"""Largest number of evaluations of a descent, in units of `max_iterations`."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base class of methods that compute an equilibrium: `Solver` and `Minimizer`.

    Args:
        tolerance: Relative residual ‖T(y) − y‖/‖T(y)‖ at which a sample has converged.
        max_iterations: Largest number of evaluations per sample.
        stop: Stopping criterion that replaces the tolerance.
        check_minimum: Whether `solve` tests for negative curvature where the hidden objective is
            not known to be convex.
    """

    tolerance: float = 1e-4
    max_iterations: int = 100
    stop: StoppingCriterion | None = None
    check_minimum: bool = True

    def __post_init__(self) -> None:
        check_tolerances(tolerance=self.tolerance)
        check_at_least_one(max_iterations=self.max_iterations)

    @abstractmethod
    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Solve `problem` without the checks that `solve` makes before and after.

        Args:
            problem: Map, context and start.
            trace: True records the residuals of all iterations, "states" also the states.

        Returns:
            State, status and residual of every sample.
        """

    @torch.no_grad()
    def solve(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        """Solve `problem`; every sample stops independently of the others.

        A tolerance below four times the machine epsilon of the state is raised to that value,
        because rounding would decide which samples reach it. If the hidden objective is not known
        to be convex, converged samples are tested for negative curvature, and a sample at a saddle
        or a maximum descends from there.

        Args:
            problem: Map, context and start.
            trace: True records the residuals of all iterations, "states" also the states.

        Returns:
            State, status and residual of every sample.
        """
        finest = finest_tolerance(problem.state_dtype)
        if self.tolerance < finest:
            return replace(self, tolerance=finest).solve(problem, trace=trace)
        potential = problem.potential
        solution = self.run(problem, trace=trace)
        if potential is None or potential.is_convex or self.stop is not None:
            return solution
        if not self.check_minimum:
            reached = solution.status == int(Status.CONVERGED)
            status = solution.status.masked_fill(reached, int(Status.STATIONARY))
            return replace(solution, status=status)

        def descend(rest: FixedPointProblem) -> Solution:
            return self.minimizer.run(rest, trace=trace or problem.trace)

        return at_minima(problem, solution, self.tolerance, descend)

    @property
    def couples_batch(self) -> bool:
        """Whether the method makes the result of a sample depend on the rest of the batch."""
        return False

    @property
    def criterion(self) -> StoppingCriterion:
        """Stopping criterion: `stop`, or the relative residual with `tolerance`."""
        return RelativeResidual(self.tolerance) if self.stop is None else self.stop

    @property
    def method(self) -> str:
        """Name of the method in a `Solution`."""
        return type(self).__name__

    @property
    def minimizer(self) -> Minimizer:
        """Method that minimizes the hidden objective where this one cannot continue."""
        from equilibria.solvers.minimize.descent import Descent

        budget = DESCENT_BUDGET * self.max_iterations
        return Descent(tolerance=self.tolerance, max_iterations=budget, stop=self.stop)

    def unrolled_step(self, point: State, image: State, iteration: int) -> State:
        """Return the next state of an iteration that a gradient rule unrolls.

        The default is y ← T(y). Methods with another differentiable step override it.

        Args:
            point: State y.
            image: T(y).
            iteration: Number of the iteration, from 1.
        """
        return image

    def warm_up(self, problem: FixedPointProblem) -> tuple[FixedPointProblem, Tensor, int]:
        """Run plain steps y ← T(y) from the start while the map still changes.

        That is in the first `problem.refresh_until` iterations, in which `refresh` recomputes
        signs or perturbations that the map reads. Most maps have no such iterations.

        Args:
            problem: Problem to solve. It releases its start if it is solved once.

        Returns:
            The problem with its final map, the packed point, and the number of steps.
        """
        point = problem.take_start()
        steps = 0
        while problem.refresh is not None and steps < problem.refresh_until:
            point = problem.evaluate(point)
            problem = problem.refreshed(point)
            steps += 1
        return problem, point, steps
