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
"""Relative differences of objectives below this are rounding errors in float64."""


@dataclass(frozen=True)
class Convergence:
    """Objective and residual of every iterate y_k of a solve, k = 0, 1, ….

    A problem is one sample, or the whole batch if the batch is coupled. A problem that has
    converged repeats its last values; `stops` is its number of iterations.

    Attributes:
        solver: Name of the solver's class.
        stops: Number of iterations of each problem, shape (problems,).
        residual: ‖y_k − T(y_k)‖ for the map T, shape (iterations, problems).
        objective: Hidden objective G(y_k), shape (iterations, problems); None if the equilibrium
            does not minimize one.
        minimum: G(y*) at the equilibrium y*, shape (problems,); None where `objective` is None.
        contraction: Guaranteed contraction factor q: each Picard iteration multiplies the residual
            by at most q. None if no bound is known.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> convergence = eq.analysis.follow_solve(model, images, eq.Picard(tolerance=1e-4))
        >>> convergence.objective_falls, convergence.contraction < 1
        (True, True)
    """

    solver: str
    stops: Tensor
    residual: Tensor
    objective: Tensor | None
    minimum: Tensor | None
    contraction: float | None

    @property
    def iterations(self) -> int:
        """Number of recorded iterations."""
        return self.residual.shape[0]

    @property
    def objective_falls(self) -> bool:
        """Whether the objectives of all problems decrease in every iteration, up to rounding."""
        if self.objective is None or self.iterations < 2:
            return False
        rounding = ROUNDING * self.objective.abs().amax(dim=0).clamp_min(1)
        return bool((self.objective.diff(dim=0) <= rounding).all())

    def excess(self) -> Tensor | None:
        """Return the objective of each iterate minus its minimum; NaN for rounding errors.

        The shape is (iterations, problems).
        """
        if self.objective is None or self.minimum is None:
            return None
        difference = self.objective - self.minimum
        resolution = 4 * torch.finfo(difference.dtype).eps * self.minimum.abs()
        return torch.where(difference > resolution, difference, torch.nan)

    def proven_residual(self) -> Tensor | None:
        """Return a bound on the residual of Picard, qᵏ times the mean initial residual.

        q is the contraction factor and k the iteration. None if q is unknown or at least 1.
        """
        if self.contraction is None or self.contraction >= 1:
            return None
        powers = torch.arange(self.iterations, dtype=torch.float64)
        return self.residual[0].mean() * self.contraction**powers


@torch.no_grad()
def follow_solve(model: EquilibriumClassifier, images: Tensor, solver: Method) -> Convergence:
    """Record objective and residual along a solve in float64.

    Args:
        model: Classifier with an equilibrium layer; it is not changed.
        images: Batch of images, shape (B, C, H, W).
        solver: Solver to follow.

    Returns:
        Objective and residual of every iterate.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:2]
        >>> convergence = eq.analysis.follow_solve(model, images, eq.Picard(tolerance=1e-4))
        >>> bool((convergence.residual[-1] < convergence.residual[0]).all())
        True
    """
    precise = copy.deepcopy(model).cpu().double().eval()
    images = images.cpu().double()
    cell, inputs = precise.layer.cell, as_inputs(precise.stem(images))
    # Start at the initial state of the cell: a solve may start closer to the equilibrium.
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
    # The equilibrium of Deep OptEq with L > 2 layers solves an inclusion and minimizes nothing.
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
