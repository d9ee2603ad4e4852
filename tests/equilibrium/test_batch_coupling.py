"""Layers whose samples depend on each other warn at inference."""

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


def from_custom_cell() -> eq.EquilibriumLayer:
    return eq.EquilibriumLayer(cell=CoupledMean())


@pytest.mark.parametrize("make", [from_energy, from_deep_cell, from_custom_cell])
def test_coupled_layers_warn_once_at_inference(make: object) -> None:
    assert callable(make)
    layer: eq.EquilibriumLayer = make()
    x = torch.randn(4, 3) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.train()(x)
        layer.eval()(x[:1])  # a single sample does not depend on others
        layer(x[:0])
    with pytest.warns(BatchCouplingWarning, match="depends on the others in its batch"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        layer.solve(x)


def test_solve_warns_and_uncoupled_layers_do_not() -> None:
    x = torch.randn(4, 3) + 1
    with pytest.warns(BatchCouplingWarning):
        from_energy().eval().solve(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eq.EquilibriumLayer(eq.Input(torch.eye(3)) + eq.Quadratic(0.5 * torch.eye(3))).eval()(x)
    assert issubclass(BatchCouplingWarning, UserWarning)


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_sam_with_a_coupling_regularizer_couples_the_batch() -> None:
    cell = DeepOptEqCell([UnitLayer(0.5 * torch.eye(3), torch.eye(3))])
    x = torch.randn(4, 3) + 1
    for regularizer, problems in ((eq.energies.L2(), 4), (eq.energies.Decorrelation(), 1)):
        layer = eq.EquilibriumLayer(cell=cell, solver=eq.solvers.SAM(regularizer=regularizer))
        assert layer.train().solve(x).status.shape == (problems,)
        assert layer.couples_batch is regularizer.couples_batch
