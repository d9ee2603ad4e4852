"""How a solve approaches its equilibrium, iteration by iteration."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.equilibrium.layer import as_inputs
from equilibria.equilibrium.objective import NoObjectiveError, distance_per_sample
from equilibria.models import EquilibriumClassifier
from equilibria.solvers import Picard
from equilibria.solvers.method import Method

ROUNDING = 1e-12
"""Relative to an objective's value: differences below it mean nothing in float64."""


@dataclass(frozen=True)
class Convergence:
    """Objective and residual at y_k = T(…), k = 0, 1, …; shape `(iterations, problems)`.

    A problem, which is a sample unless the batch is coupled, keeps its last values from where it
    has converged; `stops` says how many of its rows are its own.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> found = eq.report.follow_solve(model, images, eq.Picard(tolerance=1e-4))
        >>> found.objective_falls, found.contraction < 1
        (True, True)
    """

    solver: str
    stops: Tensor
    residual: Tensor
    """‖y_k − T(y_k)‖."""
    objective: Tensor | None
    """G(y_k), or None where the model has no objective that its equilibrium minimizes."""
    minimum: Tensor | None
    """G(y*), one a problem."""
    contraction: float | None
    """A proven bound q: along a Picard iteration the residual falls by this factor at least."""

    @property
    def iterations(self) -> int:
        """Number of recorded iterations."""
        return self.residual.shape[0]

    @property
    def objective_falls(self) -> bool:
        """Whether the objective of no sample rises at any iteration, but for rounding."""
        if self.objective is None or self.iterations < 2:
            return False
        rounding = ROUNDING * self.objective.abs().amax(dim=0).clamp_min(1)
        return bool((self.objective.diff(dim=0) <= rounding).all())

    def excess(self) -> Tensor | None:
        """G(y_k) − G(y*); NaN where the difference is nothing but rounding."""
        if self.objective is None or self.minimum is None:
            return None
        difference = self.objective - self.minimum
        resolution = 4 * torch.finfo(difference.dtype).eps * self.minimum.abs()
        return torch.where(difference > resolution, difference, torch.nan)

    def proven_residual(self) -> Tensor | None:
        """qᵏ times the first residual, as a mean: what a Picard iteration stays below."""
        if self.contraction is None or self.contraction >= 1:
            return None
        powers = torch.arange(self.iterations, dtype=torch.float64)
        return self.residual[0].mean() * self.contraction**powers


@torch.no_grad()
def follow_solve(model: EquilibriumClassifier, images: Tensor, solver: Method) -> Convergence:
    """Solve in float64, where the last digits still mean something, and evaluate every iterate.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> found = eq.report.follow_solve(model, images, eq.Picard(tolerance=1e-4))
        >>> bool((found.residual[-1] < found.residual[0]).all())
        True
    """
    precise = copy.deepcopy(model).cpu().double().eval()
    images = images.cpu().double()
    cell, inputs = precise.layer.cell, as_inputs(precise.stem(images))
    # From zero on; other solves start ahead of it where they can.
    start = cell.initial_state(*inputs, cell.inject(*inputs))
    solution = precise.solve(images, start=start, solver=solver, trace="states")
    assert solution.trace is not None
    assert solution.trace.states is not None
    states = solution.trace.states
    try:
        objective = precise.objective(images)
    except NoObjectiveError:
        objective = None
    values = minimum = None
    # Deep OptEq with L > 2 layers has an inclusion in the place of an objective.
    if objective is not None and objective.is_minimized:
        values = torch.stack([objective.value(state).reshape(-1) for state in states])
        polish = Picard(tolerance=ROUNDING, max_iterations=100 * len(states))
        minimum = objective.value(precise.solve(images, start=solution.state, solver=polish).state)
    bound = precise.contraction_bound(images)
    return Convergence(
        solver=type(solver).__name__,
        stops=solution.iterations,
        residual=torch.stack(
            [distance_per_sample(y, cell.step(y, solution.context)) for y in states]
        ),
        objective=values,
        minimum=minimum,
        contraction=None if bound is None else float(bound.max()),
    )
