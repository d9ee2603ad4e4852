"""Input optimization where plain steps diverge: the layer's solver finds the equilibria."""

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
    """Curvature 50: the plain step multiplies errors by −50."""
    return 25 * y.square().sum(dim=1)


@eq.energy_term
def uneven(y: Tensor, x: Tensor) -> Tensor:
    """Curvatures from 0 to 100."""
    weights = torch.linspace(0, 50, y.shape[1], dtype=y.dtype)
    return (weights * y.square()).sum(dim=1)


@eq.energy_term
def quartic(y: Tensor, x: Tensor) -> Tensor:
    """Curvature 12 y²: the plain step contracts near zero and diverges from far away."""
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
    """The loss with ridge, at equilibria that the layer itself solves for."""
    with eq.solving(model, gradient=eq.Implicit(tolerance=1e-10), **EXACT) as record:
        value: Tensor = loss(model(x)) + ridge(x)
    assert all(bool(solution.converged.all()) for solution in record.solutions)
    return value


def exact_gradient(model: nn.Module, x: Tensor, loss: Any) -> Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(exact_loss(model, leaf, loss).sum(), leaf)
    return gradient


def least(model: Any, x0: Tensor, loss: Any, curvature: Tensor, quartic_share: float) -> float:
    """The minimum that SciPy finds of the composed function, without solvers of this library.

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


def is_exact(model: nn.Module, found: eq.inputs.InputResult, loss: Any) -> bool:
    exact = exact_loss(model, found.x, loss).detach()
    return bool((found.loss - exact).abs().max() <= 1e-8)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_reports_the_loss_of_an_equilibrium_and_lowers_it(engine: str) -> None:
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(2), inputs(2)
    found = optimize_input(model, loss, x0, penalty=ridge, engine=engine, iterations=6)
    assert is_exact(model, found, loss)
    torch.testing.assert_close(found.initial_loss, exact_loss(model, x0, loss).detach())
    assert bool((found.loss < 0.99 * found.initial_loss).all())
    assert float(found.state_residual.max()) < 1e-8


@pytest.mark.parametrize(
    ("term", "engine", "curvature", "quartic_share"),
    [
        (steep, "momentum", torch.tensor(50.0), 0.0),
        (steep, "secant", torch.tensor(50.0), 0.0),
        (uneven, "secant", torch.linspace(0, 100, 6), 0.0),
        (quartic, "secant", torch.tensor(0.0), 1.0),
    ],
)
def test_the_optimum_is_that_of_a_numerical_minimizer(
    term: eq.Energy, engine: str, curvature: Tensor, quartic_share: float
) -> None:
    model, loss, x0 = steep_model(term, "identity"), squared_distance(2), inputs(2)
    found = optimize_input(
        model,
        loss,
        x0,
        penalty=ridge,
        engine=engine,
        iterations=30,
        settings=SearchSettings(tolerance=1e-4),
    )
    assert is_exact(model, found, loss)
    minimum = least(model, x0, loss, curvature.double(), quartic_share)
    assert float(found.loss.sum()) == pytest.approx(minimum, rel=1e-6)


@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh"])
def test_activations_other_than_the_identity(activation: str) -> None:
    model, loss, x0 = steep_model(steep, activation), squared_distance(2), inputs(2)
    found = optimize_input(model, loss, x0, penalty=ridge, iterations=5)
    assert is_exact(model, found, loss)
    assert bool((found.loss < found.initial_loss).all())
    assert not bool((found.status == Status.DIVERGED).any())


def test_an_attack_ends_on_the_ball() -> None:
    """With normalized steps z and μ are swept once per step, without help."""
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(2), inputs(2)
    found = optimize_input(
        model,
        lambda outputs: -loss(outputs),
        x0,
        constraint=L2Ball(x0, 0.5),
        settings=SearchSettings(normalize=True),
        iterations=8,
    )
    assert found.engine == "momentum"
    torch.testing.assert_close((found.x - x0).norm(dim=1), torch.full((2,), 0.5).double())
    with eq.solving(model, **EXACT), torch.no_grad():
        torch.testing.assert_close(found.loss, -loss(model(found.x)), rtol=1e-8, atol=1e-8)
    leaf = found.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model(leaf)).sum(), leaf)
    cosine = torch.cosine_similarity(gradient, found.x - x0)
    assert float(cosine.min()) > 0.99


def test_the_gradient_in_x_is_that_of_finite_differences() -> None:
    """∂/∂x (ℓ + μᵀT) with the μ of the result."""
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(1), inputs(1)
    found = optimize_input(model, loss, x0, penalty=ridge, iterations=3)
    problem = found.problem
    leaf = found.x.clone().requires_grad_()
    context = problem.inject(leaf)
    assert isinstance(found.state, Tensor)
    image = problem.layer.cell.step(found.state, context)
    value = problem.losses(found.state, context, leaf).sum() + (found.adjoint * image).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    for place in range(4):
        step = torch.zeros_like(found.x)
        step[0, place] = 1e-5
        above, below = (exact_loss(model, found.x + way * step, loss).item() for way in (1, -1))
        assert gradient[0, place].item() == pytest.approx((above - below) / 2e-5, rel=1e-4)


def test_without_checks_the_loss_is_that_of_an_equilibrium_all_the_same() -> None:
    model, loss, x0 = steep_model(uneven, "identity"), squared_distance(2), inputs(2)
    found = optimize_input(
        model, loss, x0, penalty=ridge, iterations=4, settings=SearchSettings(verify=False)
    )
    assert is_exact(model, found, loss)
    leaf = [p for p in model.parameters() if p.requires_grad]
    own = torch.autograd.grad(optimal_value(found).sum(), leaf, allow_unused=True)
    exact = torch.autograd.grad(exact_loss(model, found.x, loss).sum(), leaf)
    for mine, true in zip(own, exact, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-7)


def test_a_sample_alone_is_that_sample_in_a_batch() -> None:
    """One sample is steep, another is not: the input scales the curvature."""

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
        # On a ball Adam stops at a stationary point of its own metric, also with exact solves.
        (Engine(rule="adam", sweeps=3, alpha_x=0.3), False, 289.8),
    ],
)
def test_a_map_that_contracts_at_the_start_and_not_further_on(
    engine: str | Engine, normalize: bool, minimum: float
) -> None:
    """The search starts over where its sweeps diverge; the minima are those of solves at each x."""
    model, x0 = steep_model(quartic, "identity"), 0.02 * inputs(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0 if "bias" in name and "head" not in name else 1)

    def loss(outputs: Tensor) -> Tensor:
        return (outputs - 8).square().sum(dim=1)

    found = optimize_input(
        model,
        loss,
        x0,
        penalty=ridge,
        engine=engine,
        constraint=L2Ball(x0, 2.0),
        settings=SearchSettings(normalize=normalize),
        iterations=25,
    )
    assert is_exact(model, found, loss)
    assert float(found.loss.sum()) == pytest.approx(minimum, rel=0.02)


def test_samples_of_a_group_share_their_input() -> None:
    model, loss = steep_model(uneven, "identity"), squared_distance(3)
    groups, x0 = torch.tensor([0, 1, 0]), inputs(2)
    found = optimize_input(
        model,
        loss,
        x0,
        groups=groups,
        penalty=ridge,
        iterations=25,
        settings=SearchSettings(tolerance=1e-5),
    )
    with eq.solving(model, gradient=eq.Implicit(tolerance=1e-10), **EXACT):
        leaf = found.x.clone().requires_grad_()
        losses = loss(model(leaf[groups]))
        (gradient,) = torch.autograd.grad(losses.sum() + ridge(leaf).sum(), leaf)
    expected = torch.stack([losses[groups == g].sum() for g in (0, 1)]) + ridge(leaf)
    torch.testing.assert_close(found.loss, expected.detach(), rtol=1e-8, atol=1e-8)
    assert float(gradient.abs().max()) < 1e-3


def test_single_precision_with_a_large_curvature() -> None:
    """One more evaluation of T in float32 would add an error of 1e-2; the solve is in float64."""

    @eq.energy_term
    def extreme(y: Tensor, x: Tensor) -> Tensor:
        return 1e5 * (y - 0.3).square().sum(dim=1)

    model, x0 = steep_model(extreme, "identity").float(), inputs(2).float()
    found = optimize_input(
        model, lambda o: o.square().sum(dim=1), x0, penalty=ridge, engine="momentum", iterations=20
    )
    assert bool(found.converged.all()), found.summary()
    exact = exact_loss(model.double(), found.x.double(), lambda o: o.square().sum(dim=1))
    torch.testing.assert_close(found.loss.double(), exact.detach(), rtol=1e-5, atol=1e-5)


def test_a_solver_that_cannot_find_the_equilibrium_is_reported_with_the_remedy() -> None:
    model = steep_model(steep, "identity", solver="picard")
    with pytest.warns(ConvergenceWarning, match="equilibrium was not found.*solver='auto'"):
        found = optimize_input(model, squared_distance(2), inputs(2), iterations=2)
    assert bool(found.loss.isnan().all())
    assert found.status.tolist() == [Status.DIVERGED] * 2
    assert "so its loss is NaN" in found.message(0)
    with eq.solving(model, solver="auto"):
        found = optimize_input(model, squared_distance(2), inputs(2), iterations=2)
    assert bool(torch.isfinite(found.loss).all())


def test_a_map_without_fixed_point_or_objective_is_reported_with_a_remedy() -> None:
    """Only the sample that has none: the other is optimized."""

    def doubled(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, z / 2 + x, 2 * z.abs() + 1)

    model = eq.models.EquilibriumClassifier(
        nn.Identity(), eq.EquilibriumLayer(doubled), nn.Linear(4, 3)
    ).double()
    x0 = torch.tensor([[1.0], [-1.0]]).double().expand(2, 4)
    with pytest.warns(ConvergenceWarning, match="choose another solver"):
        found = optimize_input(
            model, squared_distance(2), x0, iterations=3, settings=SearchSettings(step_size=1e-3)
        )
    assert found.loss.isnan().tolist() == [False, True]
    assert found.status[1] == Status.DIVERGED
    assert found.status[0] != Status.DIVERGED
    assert "mean loss nan" not in found.summary()


def test_a_solver_whose_result_depends_on_its_steps_is_refused() -> None:
    model = smooth_model()
    refused = pytest.raises(ValueError, match=r"SAM.*solver='auto'")
    with eq.solving(model, solver=eq.solvers.SAM()), refused:
        optimize_input(model, squared_distance(), inputs())


def test_a_layer_that_descends_from_the_start_is_searched() -> None:
    model = steep_model(steep, "identity", solver=eq.solvers.Descent())
    loss, x0 = squared_distance(2), inputs(2)
    found = optimize_input(model, loss, x0, penalty=ridge, iterations=4)
    assert is_exact(model, found, loss)
    assert bool((found.loss < found.initial_loss).all())


def test_few_iterations_of_the_layer_do_not_keep_a_search_from_the_equilibrium() -> None:
    model = steep_model(uneven, "identity", max_iterations=5)
    loss, x0 = squared_distance(2), inputs(2)
    found = optimize_input(model, loss, x0, penalty=ridge, iterations=4)
    assert is_exact(model, found, loss)
    assert bool((found.loss < found.initial_loss).all())


def test_a_contracting_energy_is_swept_as_always() -> None:
    """No solve and no sweep in addition."""
    model, loss, x0 = smooth_model(), squared_distance(), inputs()
    found = optimize_input(
        model, loss, x0, penalty=ridge, iterations=6, settings=SearchSettings(tolerance=1e-12)
    )
    assert found.evaluations == 3 * 6
