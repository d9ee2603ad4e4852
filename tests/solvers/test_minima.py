"""Stationary points of objectives that are not convex: minima, saddles and maxima."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import equilibria as eq
from equilibria.context import Context
from equilibria.equilibrium.capabilities import potential
from tests.solvers.test_solvers import SOLVERS


@eq.energy_term
def double_well(y: Tensor, x: Tensor) -> Tensor:
    """2(y² − 1)² − ½xy: for x = 0 it has a maximum at zero and minima near ±1."""
    return (2 * (y.square() - 1).square() - 0.5 * x * y).sum(dim=1)


def well_layer(activation: str = "identity", **solver: Any) -> eq.EquilibriumLayer:
    options = {"name": "auto", "tolerance": 1e-6, **solver}
    return eq.EquilibriumLayer(double_well, activation=activation, solver=options).eval().double()


WELL = (1 - 1 / 8) ** 0.5  # G = ½y² + 2(y² − 1)² has G′ = y(8y² − 7)


@pytest.mark.parametrize("solver", [*SOLVERS, "auto", "descent"])
def test_a_solve_from_a_maximum_ends_at_a_minimum(solver: str) -> None:
    solution = well_layer(name=solver).solve(torch.zeros(2, 3, dtype=torch.float64))
    assert (solution.status == eq.Status.CONVERGED).all()
    assert isinstance(solution.state, Tensor)
    torch.testing.assert_close(
        solution.state.abs(), torch.full((2, 3), WELL, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_a_solve_from_a_maximum_at_a_kink_ends_at_a_minimum() -> None:
    """With ReLU no unit is active at zero, and each can only increase."""
    solution = well_layer("relu").solve(torch.zeros(2, 5, dtype=torch.float64))
    assert (solution.status == eq.Status.CONVERGED).all()
    assert isinstance(solution.state, Tensor)
    assert solution.state.sub(WELL).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [1e-20, 1e-12, 1e-8, 1e-4])
def test_a_descent_from_next_to_a_maximum_has_not_diverged(
    offset: float, dtype: torch.dtype
) -> None:
    """The state grows by up to twenty orders of magnitude."""
    layer = well_layer().to(dtype)
    solution = layer.solve(torch.full((2, 3), offset, dtype=dtype))
    assert (solution.status == eq.Status.CONVERGED).all()
    assert isinstance(solution.state, Tensor)
    assert solution.state.sub(WELL).abs().max() < 1e-4


@pytest.mark.parametrize("solver", [*SOLVERS, "auto"])
def test_a_maximum_is_reported_as_stationary_without_the_test(solver: str) -> None:
    layer = well_layer(name=solver, check_minimum=False)
    solution = layer.solve(torch.zeros(2, 3, dtype=torch.float64))
    assert (solution.status == eq.Status.STATIONARY).all()
    assert "are stationary" in solution.summary()
    assert "not tested for a minimum" in solution.message(0)


def test_a_solve_from_a_saddle_of_coupled_units_ends_at_the_global_minimum() -> None:
    """Every minimum of ½yᵀAy + ¼‖y‖⁴ with indefinite A is global."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    A = A + A.T

    @eq.energy_term
    def indefinite(y: Tensor, x: Tensor) -> Tensor:
        quartic = y.square().sum(dim=1).square() / 4
        return 0.5 * ((y @ A) * y).sum(dim=1) + quartic - (x * y).sum(dim=1)

    layer = eq.EquilibriumLayer(indefinite, activation="identity", tolerance=1e-8).eval()
    x = torch.zeros(1, 6, dtype=torch.float64)
    solution = layer.solve(x)
    assert (solution.status == eq.Status.CONVERGED).all()
    matrix = A.numpy() + np.eye(6)

    def objective(y: np.ndarray) -> float:
        return float(0.5 * y @ matrix @ y + (y @ y) ** 2 / 4)

    starts = np.random.default_rng(0).normal(size=(8, 6))
    lowest = min(minimize(objective, start).fun for start in starts)
    assert float(layer.objective(x).value(solution.state)) == pytest.approx(lowest, abs=1e-6)


def test_only_samples_at_a_maximum_are_moved() -> None:
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    both = well_layer().solve(x)
    alone = well_layer().solve(x[1:])
    assert isinstance(both.state, Tensor)
    assert isinstance(alone.state, Tensor)
    torch.testing.assert_close(both.state[1:], alone.state, rtol=1e-5, atol=0)
    assert both.state[0].abs() > 0.9


def test_the_gradient_of_a_layer_is_that_of_the_minimum() -> None:
    layer = well_layer(tolerance=1e-10).train()
    x = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).sum(), x)
    # y + 8y(y² − 1) = x/2, so that dy/dx = ½/(24y² − 7).
    assert float(slope) == pytest.approx(0.5 / (24 * WELL**2 - 7), rel=1e-6)


def test_energies_with_float32_constants_are_minimized_in_float32() -> None:
    weights = torch.tensor([1.0, 2.0])

    @eq.energy_term
    def wells(y: Tensor, x: Tensor) -> Tensor:
        return ((y.square() - 1).square() @ weights.unsqueeze(1)).squeeze(1) - (x * y).sum(dim=1)

    solution = eq.EquilibriumLayer(wells, activation="identity").eval().solve(torch.zeros(1, 2))
    assert (solution.status == eq.Status.CONVERGED).all()
    assert isinstance(solution.state, Tensor)
    assert solution.state.abs().min() > 0.5


class CountedWell(eq.Energy):
    """The double well, with the number of samples for which its gradient was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def value(self, state: Any, context: Context) -> Tensor:
        return double_well.function(state, context["x"])

    def descent(self, state: Any, context: Context) -> Any:
        self.count += len(state)
        return super().descent(state, context)


def test_the_solution_includes_the_evaluations_of_the_test() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    costs = []
    for checks in (False, True):
        term = CountedWell()
        solver = {"name": "descent", "tolerance": 1e-6, "check_minimum": checks}
        layer = eq.EquilibriumLayer(term, activation="identity", solver=solver).eval()
        solution = layer.solve(x)
        costs.append(solution.sample_evaluations)
    assert 0 < costs[1] - costs[0] <= 13 * len(x)


@pytest.mark.parametrize(
    "energy",
    [
        eq.Input(torch.eye(3)) + eq.Quadratic(eq.Dense(3, 3, norm="bound", zeta=0.9)),
        eq.Input(torch.eye(3)) + eq.energy_term(lambda y, x: y.pow(4).sum(dim=1), convex=True),
        eq.Input(torch.eye(3))
        + 0.5 * eq.FeatureRegularizer(torch.eye(3), "l2", 0.1)
        + eq.Quadratic(eq.Dense(3, 3, norm="bound", zeta=1.0)),
        eq.Input(torch.eye(3)) + eq.energies.ConvexPotential(torch.eye(3)),
    ],
    ids=["contraction", "declared", "convex plus concave", "potential"],
)
def test_convex_objectives_are_not_tested(energy: eq.Energy) -> None:
    x = torch.rand(2, 3)
    for solver in ("anderson", {"name": "anderson", "check_minimum": False}):
        layer = eq.EquilibriumLayer(energy, solver=solver).eval()
        solution = layer.solve(x)
        assert (solution.status == eq.Status.CONVERGED).all()


def test_an_objective_with_a_large_concave_part_is_not_called_convex() -> None:
    layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)) + eq.Quadratic(2 * torch.eye(2)))
    assert not potential(layer.cell).is_convex  # type: ignore[union-attr]
