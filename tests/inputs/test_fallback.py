"""Input optimization of models whose sweeps diverge: the layer's solver finds the equilibria."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import equilibria as eq
from equilibria.inputs import Engine, L2Ball, SearchSettings, optimal_value, optimize_input
from equilibria.solvers import ConvergenceWarning, Status
from tests.inputs.small_problem import inputs, ridge, smooth_model, squared_distance

ENGINES = [
    "momentum",
    "secant",
    "anderson",
    "official",
    "gradient",
    "gradient-warm",
    "adam",
    "adam-warm",
]
EXACT: dict[str, Any] = {"tolerance": 1e-10, "max_iterations": 2000}


@eq.energy_term
def steep(y: Tensor, x: Tensor) -> Tensor:
    """Curvature 50: a sweep multiplies errors by −50."""
    return 25 * y.square().sum(dim=1)


@eq.energy_term
def uneven(y: Tensor, x: Tensor) -> Tensor:
    """Curvatures from 0 to 100."""
    weights = torch.linspace(0, 50, y.shape[1], dtype=y.dtype)
    return (weights * y.square()).sum(dim=1)


@eq.energy_term
def quartic(y: Tensor, x: Tensor) -> Tensor:
    """Curvature 12 y²: sweeps contract near zero and diverge far away."""
    return y.pow(4).sum(dim=1)


def steep_model(
    term: eq.Energy, activation: str = "softplus", **solving: Any
) -> eq.models.EquilibriumClassifier:
    torch.manual_seed(0)
    layer = eq.EquilibriumLayer(eq.Input(eq.Dense(5, 6)) + term, activation=activation, **solving)
    model = eq.models.EquilibriumClassifier(nn.Linear(4, 5), layer, nn.Linear(6, 3))
    with torch.no_grad():
        for weight in (model.stem.weight, model.head.weight):
            weight.mul_(3)
    return model.double().eval()


def exact_loss(model: nn.Module, x: Tensor, loss: Any) -> Tensor:
    """Return the loss with ridge, at equilibria from the layer's own solver."""
    with eq.solving(model, gradient=eq.Implicit(tolerance=1e-10), **EXACT) as record:
        value: Tensor = loss(model(x)) + ridge(x)
    assert all(bool(solution.converged.all()) for solution in record.solutions)
    return value


def exact_gradient(model: nn.Module, x: Tensor, loss: Any) -> Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(exact_loss(model, leaf, loss).sum(), leaf)
    return gradient


def minimum_by_scipy(
    model: Any, x0: Tensor, loss: Any, curvature: Tensor, quartic_share: float
) -> float:
    """Return the minimum of the composed function, computed without solvers of this library.

    The stationary y of these energies with the identity solves (1 + c) y + 4 q y³ = u per unit.
    """

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.tensor(flat).reshape(x0.shape).requires_grad_()
        context = model.layer.cell.inject(model.stem(x))
        u = model.layer.cell.energy.descent(x.new_zeros(len(x), 6), context)
        y = u.detach() / (1 + curvature)
        for _ in range(60):
            y = y.detach()
            slope = 1 + curvature + 12 * quartic_share * y.square()
            y = y - ((1 + curvature) * y + 4 * quartic_share * y**3 - u) / slope
        value = (loss(model.head(y)) + ridge(x)).sum()
        (gradient,) = torch.autograd.grad(value, x)
        return float(value.detach()), gradient.flatten().numpy()

    start = x0.flatten().numpy()
    return float(minimize(function, start, jac=True, method="BFGS", tol=1e-7).fun)


def is_exact(model: nn.Module, result: eq.inputs.InputResult, loss: Any) -> bool:
    exact = exact_loss(model, result.x, loss).detach()
    return bool((result.loss - exact).abs().max() <= 1e-8)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_lowers_the_true_loss(engine: str) -> None:
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(2), inputs(2)
    result = optimize_input(model, loss, x0, penalty=ridge, engine=engine, iterations=6)
    assert is_exact(model, result, loss)
    torch.testing.assert_close(result.initial_loss, exact_loss(model, x0, loss).detach())
    assert bool((result.loss < 0.99 * result.initial_loss).all())
    assert float(result.state_residual.max()) < 1e-8


@pytest.mark.parametrize(
    ("term", "engine", "curvature", "quartic_share"),
    [
        (steep, "momentum", torch.tensor(50.0), 0.0),
        (steep, "secant", torch.tensor(50.0), 0.0),
        (uneven, "secant", torch.linspace(0, 100, 6), 0.0),
        (quartic, "secant", torch.tensor(0.0), 1.0),
    ],
)
def test_optimum_agrees_with_scipy(
    term: eq.Energy, engine: str, curvature: Tensor, quartic_share: float
) -> None:
    model, loss, x0 = steep_model(term, "identity"), squared_distance(2), inputs(2)
    result = optimize_input(
        model,
        loss,
        x0,
        penalty=ridge,
        engine=engine,
        iterations=30,
        settings=SearchSettings(tolerance=1e-4),
    )
    assert is_exact(model, result, loss)
    minimum = minimum_by_scipy(model, x0, loss, curvature.double(), quartic_share)
    assert float(result.loss.sum()) == pytest.approx(minimum, rel=1e-6)


@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh"])
def test_every_activation_is_supported(activation: str) -> None:
    model, loss, x0 = steep_model(steep, activation), squared_distance(2), inputs(2)
    result = optimize_input(model, loss, x0, penalty=ridge, iterations=5)
    assert is_exact(model, result, loss)
    assert bool((result.loss < result.initial_loss).all())
    assert not bool((result.status == Status.DIVERGED).any())


def test_attack_ends_on_the_ball() -> None:
    """Normalized steps have one sweep per step."""
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(2), inputs(2)
    result = optimize_input(
        model,
        lambda outputs: -loss(outputs),
        x0,
        constraint=L2Ball(x0, 0.5),
        settings=SearchSettings(normalize=True),
        iterations=8,
    )
    assert result.engine == "momentum"
    torch.testing.assert_close((result.x - x0).norm(dim=1), torch.full((2,), 0.5).double())
    with eq.solving(model, **EXACT), torch.no_grad():
        torch.testing.assert_close(result.loss, -loss(model(result.x)), rtol=1e-8, atol=1e-8)
    leaf = result.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model(leaf)).sum(), leaf)
    cosine = torch.cosine_similarity(gradient, result.x - x0)
    assert float(cosine.min()) > 0.99


def test_gradient_in_x_agrees_with_finite_differences() -> None:
    """The gradient is ∂/∂x (ℓ + μᵀT) with the μ of the result."""
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(1), inputs(1)
    result = optimize_input(model, loss, x0, penalty=ridge, iterations=3)
    problem = result.problem
    leaf = result.x.clone().requires_grad_()
    context = problem.inject(leaf)
    assert isinstance(result.state, Tensor)
    image = problem.layer.cell.step(result.state, context)
    value = problem.losses(result.state, context, leaf).sum() + (result.adjoint * image).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    for index in range(4):
        step = torch.zeros_like(result.x)
        step[0, index] = 1e-5
        above, below = (exact_loss(model, result.x + sign * step, loss).item() for sign in (1, -1))
        assert gradient[0, index].item() == pytest.approx((above - below) / 2e-5, rel=1e-4)


def test_loss_without_verify_is_that_of_an_equilibrium() -> None:
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(2), inputs(2)
    result = optimize_input(
        model, loss, x0, penalty=ridge, iterations=4, settings=SearchSettings(verify=False)
    )
    assert is_exact(model, result, loss)
    leaf = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(optimal_value(result).sum(), leaf, allow_unused=True)
    exact = torch.autograd.grad(exact_loss(model, result.x, loss).sum(), leaf)
    for gradient, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_result_does_not_depend_on_the_batch() -> None:
    """The input scales the curvature, so the sweeps of only some samples diverge."""

    @eq.energy_term
    def scaled(y: Tensor, x: Tensor) -> Tensor:
        return x.square().sum(dim=1) * y.square().sum(dim=1)

    model, x0 = steep_model(scaled, "identity"), inputs(3) * torch.tensor([[0.02], [1.0], [3.0]])
    with torch.no_grad():
        model.stem.bias.zero_()
    target = torch.randn(3, 3).double()
    options: dict[str, Any] = {"iterations": 4, "penalty": ridge}
    together = optimize_input(model, lambda o: (o - target).square().sum(dim=1), x0, **options)
    for row in range(3):
        alone = optimize_input(
            model,
            lambda o, row=row: (o - target[row]).square().sum(dim=1),
            x0[row : row + 1],
            **options,
        )
        torch.testing.assert_close(alone.x[0], together.x[row], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(alone.loss[0], together.loss[row])


@pytest.mark.parametrize(
    ("engine", "normalize", "minimum"),
    [
        ("momentum", True, 262.29),
        ("secant", False, 262.29),
        ("secant", True, 262.29),
        ("anderson", False, 262.29),
        # On a ball Adam stops at a stationary point of its metric, even with exact solves.
        (Engine(rule="adam", sweeps=3, alpha_x=0.3), False, 289.8),
    ],
)
def test_search_restarts_when_sweeps_begin_to_diverge(
    engine: str | Engine, normalize: bool, minimum: float
) -> None:
    """The expected minima come from searches with solves at each x."""
    model, x0 = steep_model(quartic, "identity"), 0.02 * inputs(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0 if "bias" in name and "head" not in name else 1)

    def loss(outputs: Tensor) -> Tensor:
        return (outputs - 8).square().sum(dim=1)

    result = optimize_input(
        model,
        loss,
        x0,
        penalty=ridge,
        engine=engine,
        constraint=L2Ball(x0, 2.0),
        settings=SearchSettings(normalize=normalize),
        iterations=25,
    )
    assert is_exact(model, result, loss)
    assert float(result.loss.sum()) == pytest.approx(minimum, rel=0.02)


def test_samples_of_a_group_share_an_input() -> None:
    model, loss = steep_model(uneven, "identity"), squared_distance(3)
    groups, x0 = torch.tensor([0, 1, 0]), inputs(2)
    result = optimize_input(
        model,
        loss,
        x0,
        groups=groups,
        penalty=ridge,
        iterations=25,
        settings=SearchSettings(tolerance=1e-5),
    )
    with eq.solving(model, gradient=eq.Implicit(tolerance=1e-10), **EXACT):
        leaf = result.x.clone().requires_grad_()
        losses = loss(model(leaf[groups]))
        (gradient,) = torch.autograd.grad(losses.sum() + ridge(leaf).sum(), leaf)
    expected = torch.stack([losses[groups == g].sum() for g in (0, 1)]) + ridge(leaf)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-8, atol=1e-8)
    assert float(gradient.abs().max()) < 1e-3


def test_large_curvature_in_single_precision() -> None:
    """One more evaluation of T in float32 would add an error of 1e-2 to the solve in float64."""

    @eq.energy_term
    def extreme(y: Tensor, x: Tensor) -> Tensor:
        return 1e5 * (y - 0.3).square().sum(dim=1)

    model, x0 = steep_model(extreme, "identity").float(), inputs(2).float()
    result = optimize_input(
        model, lambda o: o.square().sum(dim=1), x0, penalty=ridge, engine="momentum", iterations=20
    )
    assert bool(result.converged.all()), result.summary()
    exact = exact_loss(model.double(), result.x.double(), lambda o: o.square().sum(dim=1))
    torch.testing.assert_close(result.loss.double(), exact.detach(), rtol=1e-5, atol=1e-5)


def test_failed_final_solve_warns_with_the_remedy() -> None:
    model = steep_model(steep, "identity", solver="picard")
    with pytest.warns(ConvergenceWarning, match=r"solve for the equilibrium.*solver='auto'"):
        result = optimize_input(model, squared_distance(2), inputs(2), iterations=2)
    assert bool(result.loss.isnan().all())
    assert result.status.tolist() == [Status.DIVERGED] * 2
    assert "the loss is NaN" in result.message(0)
    with eq.solving(model, solver="auto"):
        result = optimize_input(model, squared_distance(2), inputs(2), iterations=2)
    assert bool(torch.isfinite(result.loss).all())


def test_map_without_fixed_point_warns_with_a_remedy() -> None:
    """Samples with a fixed point are optimized nevertheless."""

    def doubled(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, z / 2 + x, 2 * z.abs() + 1)

    model = eq.models.EquilibriumClassifier(
        nn.Identity(), eq.EquilibriumLayer(doubled), nn.Linear(4, 3)
    ).double()
    x0 = torch.tensor([[1.0], [-1.0]]).double().expand(2, 4)
    with pytest.warns(ConvergenceWarning, match="damp the iteration"):
        result = optimize_input(
            model, squared_distance(2), x0, iterations=3, settings=SearchSettings(step_size=1e-3)
        )
    assert result.loss.isnan().tolist() == [False, True]
    assert result.status[1] == Status.DIVERGED
    assert result.status[0] != Status.DIVERGED
    assert "mean loss nan" not in result.summary()


def test_sam_solver_is_rejected() -> None:
    model = smooth_model()
    rejected = pytest.raises(ValueError, match=r"SAM.*solver='auto'")
    with eq.solving(model, solver=eq.solvers.SAM()), rejected:
        optimize_input(model, squared_distance(), inputs())


def test_layer_with_descent_solver_is_supported() -> None:
    model = steep_model(steep, "identity", solver=eq.solvers.Descent())
    loss, x0 = squared_distance(2), inputs(2)
    result = optimize_input(model, loss, x0, penalty=ridge, iterations=4)
    assert is_exact(model, result, loss)
    assert bool((result.loss < result.initial_loss).all())


def test_low_iteration_limit_of_the_layer_does_not_stop_solves() -> None:
    model = steep_model(uneven, "identity", max_iterations=5)
    loss, x0 = squared_distance(2), inputs(2)
    result = optimize_input(model, loss, x0, penalty=ridge, iterations=4)
    assert is_exact(model, result, loss)
    assert bool((result.loss < result.initial_loss).all())


def test_contracting_energy_needs_no_fallback() -> None:
    """The number of evaluations is that of the sweeps alone."""
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    result = optimize_input(
        model, loss, x0, penalty=ridge, iterations=6, settings=SearchSettings(tolerance=1e-12)
    )
    assert result.evaluations == 3 * 6
