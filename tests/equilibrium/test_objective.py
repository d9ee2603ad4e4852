"""Hidden objectives compared with autograd, numerical minimizers and Theorem 1, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

import equilibria as eq
from equilibria.context.state import sum_per_sample
from equilibria.models import OptEqCell

SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=5000)
SHAPES = {"square": (4, 4), "tall": (3, 6), "wide": (6, 3), "singular": (4, 4), "conv": (2, 3)}


def opteq(shape: str, activation: str, mu: float = 1.0, alpha: float = 1.0) -> OptEqCell:
    """Cell with W invertible, rectangular, singular or convolutional, and ‖W‖² L_σ < μ."""
    torch.manual_seed(0)
    columns, rows = SHAPES[shape]
    zeta = 0.9 * mu**0.5
    W: eq.LinearOperator
    if shape == "conv":
        W = eq.Conv2d(columns, rows, 3, norm="bound", zeta=zeta)
        U: eq.LinearOperator = eq.Conv2d(2, rows, 3)
    else:
        W = eq.Dense(columns, rows, norm="bound", zeta=zeta)
        U = eq.Dense(2, rows)
        if shape == "singular":
            with torch.no_grad():
                W.kernel[:, 2:] = W.kernel[:, :2]
    with torch.no_grad():
        W.kernel.mul_(5)
    return OptEqCell(W, U, activation=activation, mu=mu, alpha=alpha).double()


def inputs(shape: str) -> Tensor:
    torch.manual_seed(1)
    size = (3, 2, 3, 3) if shape == "conv" else (3, 2)
    return torch.randn(*size, dtype=torch.float64)


def solved(cell: OptEqCell, x: Tensor) -> tuple[Tensor, eq.equilibrium.Objective, eq.Solution]:
    layer = eq.EquilibriumLayer(cell=cell, solver=SOLVER, strict=True)
    solution = layer.solve(x)
    with torch.no_grad():
        return solution.state, layer.objective(x), solution


CASES = [
    (shape, activation, mu)
    for shape in SHAPES
    for activation in eq.activations.list_activations()
    for mu in ((1.0, 1.7) if activation in ("relu", "tanh") else (1.0,))
]


@pytest.mark.parametrize(("shape", "activation", "mu"), CASES)
def test_equilibria_are_stationary(shape: str, activation: str, mu: float) -> None:
    state, objective, _ = solved(opteq(shape, activation, mu), inputs(shape))
    assert (objective.residual(state) < 1e-10).all()
    assert objective.value(state).shape == (3,)
    assert torch.linalg.vector_norm(objective.gradient(state)) < 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "softplus", "identity", "leaky_relu"])
def test_gradient_is_that_of_the_value(shape: str, activation: str) -> None:
    cell = opteq(shape, activation)
    with torch.no_grad():
        context = cell.inject(inputs(shape))
    objective = cell.objective(context)
    y = cell.activation(torch.randn_like(cell.initial_state(inputs(shape), context)))
    y = y.requires_grad_()
    (expected,) = torch.autograd.grad(objective.value(y).sum(), y)
    torch.testing.assert_close(objective.gradient(y.detach()), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("shape", "activation", "mu"), CASES)
def test_equilibria_are_numerical_minimizers(shape: str, activation: str, mu: float) -> None:
    cell = opteq(shape, activation, mu)
    x = inputs(shape)[:1]
    state, objective, _ = solved(cell, x)
    bounds = {
        "relu": (0, None),
        "softplus": (1e-9, None),
        "sigmoid": (1e-9, 1 - 1e-9),
        "tanh": (-1 + 1e-9, 1 - 1e-9),
    }.get(activation, (None, None))

    # Remove the kink of the soft threshold's penalty λ|y| by splitting y = p − n with p, n ≥ 0.
    split = activation == "soft_threshold"
    if split:
        bounds = (0, None)

    def unpacked(flat: Tensor) -> Tensor:
        return (flat[: len(flat) // 2] - flat[len(flat) // 2 :] if split else flat).view_as(state)

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        variable = torch.from_numpy(flat).requires_grad_()
        value = objective.value(unpacked(variable)).sum()
        if split:
            value = value + 0.1 * (variable.sum() - unpacked(variable).abs().sum())
        (gradient,) = torch.autograd.grad(value, variable)
        return value.item(), gradient.numpy()

    torch.manual_seed(7)
    start = cell.activation(torch.randn_like(state)).flatten().numpy()
    start = np.concatenate([start.clip(0), (-start).clip(0)]) if split else start
    result = minimize(
        function,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[bounds] * len(start),
        options={"maxiter": 5000, "maxfun": 50000, "ftol": 1e-15, "gtol": 1e-10},
    )
    assert objective.value(state).item() <= result.fun + 1e-9
    minimizer = unpacked(torch.from_numpy(result.x))
    torch.testing.assert_close(minimizer, state, rtol=0, atol=2e-5)


def psi(cell: OptEqCell, v: Tensor, x: Tensor) -> Tensor:
    """ψ(v) = (1/μ) 1ᵀS(Wv + c) of Theorem 1."""
    with torch.no_grad():
        return sum_per_sample(cell.activation.primitive(pre_activation(cell, v, x))) / cell.mu


def pre_activation(cell: OptEqCell, v: Tensor, x: Tensor) -> Tensor:
    context = cell.inject(x)
    return cell.W(v, context.parts["quadratic"].weights("W")) + context.parts["input"]["c"]


def feature_shape(cell: OptEqCell, x: Tensor) -> tuple[int, ...]:
    context = cell.inject(x)
    return cell.W.input_shape(tuple(context.parts["input"]["c"].shape[1:]))


@pytest.mark.parametrize(("shape", "activation", "mu"), CASES)
def test_value_is_phi_of_theorem_1_at_every_output(shape: str, activation: str, mu: float) -> None:
    """φ(z) = ⟨z, v⟩ − ψ(v) − ½‖z‖² for z = f(v) and any v, not only at the equilibrium."""
    cell, x = opteq(shape, activation, mu), inputs(shape)
    with torch.no_grad():
        v = torch.randn(3, *feature_shape(cell, x), dtype=torch.float64)
        y = cell.activation(pre_activation(cell, v, x))
        z = cell.output(y, cell.inject(x))
        expected = sum_per_sample(z * v) - psi(cell, v, x) - 0.5 * sum_per_sample(z.square())
        torch.testing.assert_close(
            cell.objective(cell.inject(x)).value(y), expected, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("mu", [1.0, 1.7])
@pytest.mark.parametrize("activation", ["relu", "tanh", "leaky_relu", "softplus"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_layer_is_the_proximal_operator_of_phi(shape: str, activation: str, mu: float) -> None:
    """½‖u − v‖² + φ(u) is minimal at u = f(v) among the outputs u = f(v′)."""
    cell, x = opteq(shape, activation, mu), inputs(shape)[:1]
    with torch.no_grad():
        context = cell.inject(x)
        objective = cell.objective(context)
        shape_z = feature_shape(cell, x)
        v = torch.randn(1, *shape_z, dtype=torch.float64)

        def output(points: Tensor) -> tuple[Tensor, Tensor]:
            many = x.expand(len(points), *x.shape[1:])
            y = cell.activation(pre_activation(cell, points, many))
            return cell.output(y, cell.inject(many)), y

        def proximal(points: Tensor) -> Tensor:
            u, y = output(points)
            many = cell.objective(cell.inject(x.expand(len(points), *x.shape[1:])))
            return 0.5 * sum_per_sample((u - v).square()) + many.value(y)

        minimum = proximal(v)
        for radius in (1e-3, 1e-1, 1.0, 10.0):
            others = v + radius * torch.randn(200, *shape_z, dtype=torch.float64)
            assert (proximal(others) >= minimum - 1e-12).all()
    assert objective is not None


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_layer_is_a_numerical_argmin_for_an_invertible_weight(activation: str) -> None:
    """f(v) = argmin_u ½‖u − v‖² + φ(u) over all u, since φ(u) = G(W⁻ᵀu) for invertible W."""
    cell, x = opteq("square", activation), inputs("square")[:1]
    with torch.no_grad():
        context = cell.inject(x)
        objective = cell.objective(context)
        W = context.parts["quadratic"].weights("W")[0]
        v = torch.randn(1, 4, dtype=torch.float64)
        expected = cell.output(cell.activation(pre_activation(cell, v, x)), context)

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.from_numpy(flat).view(1, 4).requires_grad_()
        value = 0.5 * (y @ W - v).square().sum() + objective.value(y).sum()
        (gradient,) = torch.autograd.grad(value, y)
        return value.item(), gradient.flatten().numpy()

    bounds = (0, None) if activation == "relu" else (-1 + 1e-9, 1 - 1e-9)
    result = minimize(
        function, np.full(4, 0.1), jac=True, method="L-BFGS-B", bounds=[bounds] * 4,
        options={"ftol": 1e-15, "gtol": 1e-10},
    )  # fmt: skip
    np.testing.assert_allclose(result.x @ W.numpy(), expected[0].numpy(), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*did not converge")
@given(seed=st.integers(0, 2**16), norm=st.floats(0.1, 1.0), alpha=st.floats(0.1, 1.0))
def test_objective_decreases_along_picard_iterations(seed: int, norm: float, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    W *= norm / torch.linalg.matrix_norm(W, 2)
    c = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    for activation in ("relu", "tanh", "softplus"):
        cell = eq.EnergyCell(eq.Input(eq.operators.Identity()) + eq.Quadratic(W), activation, alpha)
        layer = eq.EquilibriumLayer(
            cell=cell, solver=eq.Picard(tolerance=1e-6, max_iterations=30)
        ).train()
        start = cell.activation(torch.randn(3, 6, generator=generator, dtype=torch.float64))
        trace = layer.solve(c, start=start, trace="states").trace
        assert trace is not None
        assert trace.states is not None
        objective = layer.objective(c)
        values = torch.stack([objective.value(state) for state in trace.states])
        assert (values.diff(dim=0) <= 1e-12 * values.abs().max()).all()


def test_objective_is_infinite_outside_the_domain() -> None:
    cell, x = opteq("square", "relu"), inputs("square")
    objective = cell.objective(cell.inject(x))
    y = torch.full((3, 4), 0.5, dtype=torch.float64)
    y[1, 2] = -0.1
    value = objective.value(y)
    assert value.isfinite().tolist() == [True, False, True]


def test_objective_of_a_coupled_energy_is_a_scalar() -> None:
    @eq.energy_term(couples_batch=True)
    def decorrelate(y: Tensor, x: Tensor) -> Tensor:
        return 0.01 * (y.T @ y).square().sum()

    energy = eq.Input(eq.operators.Identity()) + 0.1 * decorrelate
    layer = eq.EquilibriumLayer(energy, activation="relu", solver=SOLVER, strict=True)
    x = torch.rand(4, 3, dtype=torch.float64)
    solution = layer.solve(x)
    objective = layer.objective(x)
    assert objective.value(solution.state).shape == ()
    for _ in range(20):
        other = (solution.state + 0.1 * torch.randn_like(solution.state)).relu()
        assert objective.value(other) > objective.value(solution.state)
