"""Objective and residual along a solve."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.analysis import follow_solve
from equilibria.analysis.convergence import Convergence
from equilibria.analysis.formulas import model_formula
from equilibria.models import EquilibriumClassifier


def classifier(name: str, **options: object) -> EquilibriumClassifier:
    model = eq.create_model(name, in_channels=1, channels=8, init_scale=2.0, **options)
    assert isinstance(model, EquilibriumClassifier)
    return model


def picard() -> eq.Picard:
    return eq.Picard(tolerance=1e-6, max_iterations=500)


SMALL = {"opteq-small": {"width": 8}, "deep-opteq-small": {"widths": (4, 8)}}


@pytest.mark.parametrize("name", SMALL)
def test_objective_decreases_monotonically_along_picard(name: str) -> None:
    convergence = follow_solve(classifier(name, **SMALL[name]), torch.rand(5, 1, 8, 8), picard())
    assert convergence.objective is not None
    assert convergence.objective.dtype == torch.float64
    assert convergence.objective.shape == (convergence.iterations, 5)
    assert convergence.iterations > 3
    assert (convergence.objective.diff(dim=0) <= 1e-12).all()
    assert convergence.objective_falls
    excess = convergence.excess()
    assert excess is not None
    assert not excess[0].isnan().any()
    assert (excess[-1].nan_to_num(0) < 1e-6 * excess[0]).all()


@pytest.mark.parametrize("name", SMALL)
def test_picard_residual_is_below_the_proven_bound(name: str) -> None:
    convergence = follow_solve(classifier(name, **SMALL[name]), torch.rand(5, 1, 8, 8), picard())
    proven = convergence.proven_residual()
    assert proven is not None
    running = int(convergence.stops.min())
    mean = convergence.residual.mean(dim=1)
    assert (mean[:running] <= proven[:running] * (1 + 1e-9)).all()
    assert (convergence.residual[-1] < 1e-4 * convergence.residual[0]).all()


def test_residual_equals_that_of_the_objective() -> None:
    model = classifier("opteq-small", width=8).double().eval()
    images = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    convergence = follow_solve(model, images, picard())
    zero = torch.zeros(4, 8, 8, 8, dtype=torch.float64)
    states = model.solve(images, start=zero, solver=picard(), trace="states").trace.states
    expected = torch.stack([model.objective(images).residual(state) for state in states])
    torch.testing.assert_close(convergence.residual, expected.detach())


def test_follow_solve_does_not_change_the_model() -> None:
    model = classifier("opteq-small", width=8)
    follow_solve(model, torch.rand(2, 1, 8, 8), picard())
    assert model.training
    assert next(model.parameters()).dtype == torch.float32
    assert model.last_solution is None


def test_three_layers_have_an_inclusion_and_no_objective() -> None:
    model = classifier("deep-opteq-small", widths=(4, 4, 4))
    images = torch.rand(3, 1, 8, 8)
    convergence = follow_solve(model, images, picard())
    assert convergence.objective is None
    assert convergence.excess() is None
    assert not convergence.objective_falls
    assert convergence.residual[-1].max() < convergence.residual[0].min()
    assert "no objective exists" in model_formula(model).reading


def test_increasing_objective_is_detected() -> None:
    values = torch.tensor([[1.0], [0.5], [0.6]], dtype=torch.float64)
    rising = Convergence("Picard", torch.tensor([3]), values, values, values[1], 0.5)
    assert not rising.objective_falls


@pytest.mark.parametrize(
    ("name", "options", "piece"),
    [
        ("opteq-small", {"width": 8}, "σ(WWᵀy* + Ux + b)"),
        ("opteq-small", {"width": 8, "mu": 2.0}, "/2μ"),
        ("opteq-small", {"width": 8, "space": "z"}, "Moreau envelope"),
        ("deep-opteq-small", {"widths": (4, 8)}, "½‖z₁ − z₂‖²"),
        ("mopteq-small", {}, "√(M²ₖₗ + t²ₖₗ)"),
        ("geq-small", {}, "exp(−γ‖"),
    ],
)
def test_formula_matches_the_model(name: str, options: dict[str, object], piece: str) -> None:
    formula = model_formula(classifier(name, **options))
    assert piece in formula.objective + formula.equilibrium
