"""How a solve approaches its equilibrium, iteration by iteration."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.context import batch_size
from equilibria.models import EquilibriumClassifier
from equilibria.objective import Objective
from equilibria.solvers import Solver


@dataclass(frozen=True)
class Convergence:
    """Objective and residual at T(y_k), k = 0, 1, …; shape `(iterations, samples)`.

    A sample that has converged keeps its last values.
    """

    solver: str
    residual: Tensor
    """‖y − T(y)‖."""
    objective: Tensor | None
    """None where the model has no objective that its equilibrium minimises."""
    contraction: float | None
    """A proven bound q: the residual of a Picard iteration falls by this factor at least."""

    @property
    def iterations(self) -> int:
        return self.residual.shape[0]

    @property
    def objective_falls(self) -> bool:
        """Whether the objective of no sample rises at any iteration, but for rounding."""
        if self.objective is None or self.iterations < 2:
            return False
        rises = self.objective.diff(dim=0)
        rounding = 1e-12 * self.objective.abs().amax(dim=0).clamp_min(1)
        return bool((rises <= rounding).all())

    def guaranteed_residual(self) -> Tensor | None:
        """q^k times the first residual, averaged over the samples: Picard must stay below it."""
        if self.contraction is None or self.contraction >= 1:
            return None
        powers = torch.arange(self.iterations, dtype=torch.float64)
        return self.residual[0].mean() * self.contraction**powers


@dataclass(frozen=True)
class ObjectiveChange:
    """The hidden objective at the first image T(start) and at the equilibrium, as means."""

    first: float
    equilibrium: float


def follow_solve(model: EquilibriumClassifier, images: Tensor, solver: Solver[Any]) -> Convergence:
    """Solve in float64, where the last digits still mean something, and evaluate every iterate."""
    precise = copy.deepcopy(model).cpu().double().eval()
    images = images.cpu().double()
    with torch.no_grad():
        solution = precise.solve(images, solver=solver, trace="states")
        assert solution.trace is not None
        assert solution.trace.states is not None
        states = solution.trace.states
        objective = _objective(precise, images)
        residual = (
            _residuals_of_trace(solution.trace.residual, solution.residual)
            if objective is None
            else torch.stack([objective.residual(state) for state in states])
        )
        values = (
            torch.stack([objective.value(state) for state in states])
            if objective is not None and is_minimised(objective)
            else None
        )
    return Convergence(
        solver=type(solver).__name__,
        residual=residual,
        objective=values,
        contraction=precise.contraction_bound(images),
    )


@torch.no_grad()
def objective_change(
    model: EquilibriumClassifier, batches: Iterable[tuple[Tensor, Tensor]]
) -> ObjectiveChange | None:
    """What the model's own solver does to the objective; None where there is none to minimise."""
    device = next(model.parameters()).device
    was_training = model.training
    first = equilibrium = 0.0
    samples = 0
    model.eval()
    try:
        for images, _ in batches:
            images = images.to(device)
            objective = _objective(model, images)
            if objective is None or not is_minimised(objective):
                return None
            solution = model.solve(images, trace="states")
            assert solution.trace is not None
            assert solution.trace.states is not None
            first += float(objective.value(solution.trace.states[0]).sum())
            equilibrium += float(objective.value(solution.state).sum())
            samples += batch_size(solution.state)
    finally:
        model.train(was_training)
    return ObjectiveChange(first / samples, equilibrium / samples) if samples else None


def is_minimised(objective: Objective) -> bool:
    """Whether the equilibrium minimises the objective's value; Deep OptEq with L > 2 has none."""
    return bool(getattr(objective, "is_minimised", True))


def _objective(model: EquilibriumClassifier, images: Tensor) -> Objective | None:
    try:
        return model.objective(images)
    except TypeError:  # What a cell without an objective raises.
        return None


def _residuals_of_trace(traced: Tensor, final: Tensor) -> Tensor:
    """A trace's residuals with the gaps after convergence closed by each sample's last value."""
    return torch.where(traced.isnan(), final, traced)
