"""A layer whose samples depend on each other says so where that surprises: at inference."""

from __future__ import annotations

import warnings

import pytest
import torch

import equilibria as eq
from equilibria.equilibrium import BatchCouplingWarning
from equilibria.models import DeepOptEqCell, UnitLayer
from tests.problems import CoupledMean


def from_energy() -> eq.EquilibriumLayer:
    W = 0.5 * torch.eye(3)
    energy = eq.Input(torch.eye(3)) + eq.Quadratic(W)
    return eq.EquilibriumLayer(energy + eq.FeatureRegularizer(W, eq.energies.Decorrelation(), 0.01))


def from_deep_cell() -> eq.EquilibriumLayer:
    unit = UnitLayer(0.5 * torch.eye(3), torch.eye(3))
    cell = DeepOptEqCell([unit], regularizer=eq.energies.Decorrelation(), gamma=0.01)
    return eq.EquilibriumLayer(cell=cell)


def from_own_cell() -> eq.EquilibriumLayer:
    return eq.EquilibriumLayer(cell=CoupledMean())


@pytest.mark.parametrize("make", [from_energy, from_deep_cell, from_own_cell])
def test_inference_says_once_that_samples_depend_on_each_other(make: object) -> None:
    assert callable(make)
    layer: eq.EquilibriumLayer = make()
    x = torch.randn(4, 3) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.train()(x)
        layer.eval()(x[:1])  # one sample has no batch mates
        layer(x[:0])
    with pytest.warns(BatchCouplingWarning, match="depends on the others in its batch"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        layer.solve(x)


def test_solve_says_it_too_and_uncoupled_layers_say_nothing() -> None:
    x = torch.randn(4, 3) + 1
    with pytest.warns(BatchCouplingWarning):
        from_energy().eval().solve(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eq.EquilibriumLayer(eq.Input(torch.eye(3)) + eq.Quadratic(0.5 * torch.eye(3))).eval()(x)
    assert issubclass(BatchCouplingWarning, UserWarning)


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_a_solver_may_couple_the_batch_too() -> None:
    """SAM selects by a regularizer; one that relates samples makes the batch one problem."""
    cell = DeepOptEqCell([UnitLayer(0.5 * torch.eye(3), torch.eye(3))])
    x = torch.randn(4, 3) + 1
    for regularizer, problems in ((eq.energies.L2(), 4), (eq.energies.Decorrelation(), 1)):
        layer = eq.EquilibriumLayer(cell=cell, solver=eq.solvers.SAM(regularizer=regularizer))
        assert layer.train().solve(x).status.shape == (problems,)
        assert layer.couples_batch is regularizer.couples_batch
