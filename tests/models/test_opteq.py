"""OptEq: Theorem 1 in both spaces, μ, the skip connection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.models import DeepOptEqCell, OptEqCell
from equilibria.models.opteq.spaces import opteq_cell, optimal_space

SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=3000)


def operators(conv: bool, mu: float) -> tuple[eq.LinearOperator, eq.LinearOperator, Tensor]:
    torch.manual_seed(0)
    zeta = 0.9 * mu**0.5
    W: eq.LinearOperator
    if conv:
        W, U = eq.Conv2d(3, 5, 3, norm="bound", zeta=zeta), eq.Conv2d(2, 5, 1)
        x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    else:
        W, U = eq.Dense(3, 5, norm="bound", zeta=zeta), eq.Dense(2, 5)
        x = torch.randn(3, 2, dtype=torch.float64)
    with torch.no_grad():
        next(W.parameters()).mul_(4)
    return W.double(), U.double(), x


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("mu", [1.0, 1.6])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_both_spaces_have_the_same_equilibrium_objective_and_gradient(
    conv: bool, mu: float, alpha: float, activation: str
) -> None:
    W, U, x = operators(conv, mu)
    parameters = [*W.parameters(), *U.parameters()]
    outputs, values, gradients, bounds = [], [], [], []
    for space in ("y", "z"):
        cell = opteq_cell(
            W, U, bias=False, activation=activation, mu=mu, alpha=alpha, space=space  # type: ignore[arg-type]
        )  # fmt: skip
        layer = eq.EquilibriumLayer(
            cell=cell, solver=SOLVER, gradient=eq.Implicit(tolerance=1e-12), strict=True
        )
        z = layer(x)
        outputs.append(z)
        gradients.append(torch.autograd.grad(z.square().sum(), parameters))
        with torch.no_grad():
            # In z-space the objective is α M_φ^{1−α}, with α times the minimum of φ.
            values.append(layer.objective(x).value(layer.solve(x).state))
        bounds.append(layer.contraction_bound(x))
        assert layer.last_backward is not None
        assert layer.last_backward.method == "conjugate gradients"
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(alpha * values[0], values[1], rtol=1e-9, atol=1e-9)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert bounds[0] == pytest.approx(1 - alpha + alpha * 0.81, rel=1e-6)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_feature_satisfies_the_equation_of_the_paper(alpha: float) -> None:
    """z* = (1/μ) Wᵀσ(Wz* + Ux + b) (Eq. 3 with μ of Theorem 1), also with a skip connection."""
    W, U, x = operators(conv=False, mu=1.5)
    bias = torch.randn(5, dtype=torch.float64)
    cell = OptEqCell(W, U, bias=bias, mu=1.5, alpha=alpha)
    with torch.no_grad():
        z = eq.EquilibriumLayer(cell=cell, solver=SOLVER)(x)
        matrix = W.weights()[0]
        image = (z @ matrix.T + U(x) + bias).relu() @ matrix / 1.5
    torch.testing.assert_close(z, image, rtol=1e-10, atol=1e-10)


def test_space_is_the_smaller_one_by_default() -> None:
    assert optimal_space(32, 32) == "y"
    assert optimal_space(32, 16) == "y"
    assert optimal_space(16, 32) == "z"
    assert isinstance(eq.create_model("opteq-small").layer.cell, OptEqCell)
    wide = eq.create_model("opteq-small", channels=8, width=16)
    assert isinstance(wide.layer.cell, DeepOptEqCell)
    forced = eq.create_model("opteq-small", channels=8, width=16, space="y")
    assert isinstance(forced.layer.cell, OptEqCell)
    with pytest.raises(ValueError, match="space must be"):
        eq.create_model("opteq-small", space="x")


def test_invalid_mu_and_alpha_raise() -> None:
    with pytest.raises(ValueError, match="raise mu or lower zeta"):
        eq.create_model("opteq-small", mu=0.5, zeta=0.9)
    with pytest.raises(ValueError, match="mu must be positive"):
        OptEqCell(torch.eye(2), torch.eye(2), mu=0.0)
    with pytest.raises(ValueError, match="alpha must be in"):
        OptEqCell(torch.eye(2), torch.eye(2), alpha=1.2)


def test_norm_control_bounds_the_contraction_by_construction() -> None:
    for zeta in (0.5, 0.9):
        model = eq.create_model("opteq-small", zeta=zeta, init_scale=4.0).double().eval()
        images = torch.randn(1, 3, 8, 8, dtype=torch.float64)
        assert model.contraction_bound(images) == pytest.approx(zeta**2)
        cell, context = model.layer.cell, model.layer.cell.inject(model.stem(images))
        y = torch.randn(40, 32, 8, 8, dtype=torch.float64)
        v = torch.randn(40, 32, 8, 8, dtype=torch.float64)
        many = context.keep(torch.zeros(40, dtype=torch.long))
        change = (cell.step(y, many) - cell.step(v, many)).flatten(1).norm(dim=1)
        assert (change <= zeta**2 * (y - v).flatten(1).norm(dim=1)).all()
