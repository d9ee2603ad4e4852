"""Deep OptEq: Theorems 2 and 3, Corollary 1, parameter counts, learnable α."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn

import equilibria as eq
from equilibria.energies import HSIC, L1, L2, Decorrelation, Incay, Regularizer
from equilibria.models import DeepOptEqCell, UnitLayer
from equilibria.models.opteq.cells import DeepOptEqObjective

SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=5000)


def deep(
    widths: tuple[int, ...],
    alpha: float,
    activation: str = "relu",
    seed: int = 0,
    zeta: float = 0.9,
) -> tuple[DeepOptEqCell, Tensor]:
    torch.manual_seed(seed)
    layers = []
    for width in widths:
        W = eq.Dense(4, width, norm="bound", zeta=zeta)
        with torch.no_grad():
            W.kernel.mul_(3)
        layers.append(UnitLayer(W, eq.Dense(3, width), activation=activation, alpha=alpha))
    return DeepOptEqCell(layers).double(), torch.randn(2, 3, dtype=torch.float64)


def solve(cell: DeepOptEqCell, x: Tensor) -> tuple[Tensor, DeepOptEqObjective]:
    layer = eq.EquilibriumLayer(cell=cell, solver=SOLVER, strict=True)
    with torch.no_grad():
        state = layer.solve(x).state
        objective = layer.objective(x)
    assert isinstance(objective, DeepOptEqObjective)
    assert isinstance(state, Tensor)
    return state, objective


@pytest.mark.parametrize(
    ("name", "count"),
    [("deep-opteq-199k", 199_162), ("deep-opteq-162k", 161_878), ("deep-opteq-1m", 1_417_866)],
)
def test_parameter_counts_of_the_paper(name: str, count: int) -> None:
    model = eq.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("alpha", [1.0, 0.7])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("widths", [(5,), (5, 3), (5, 3, 6), (4, 4, 4, 4)])
def test_equilibrium_solves_the_inclusion_of_theorem_2(
    widths: tuple[int, ...], activation: str, alpha: float
) -> None:
    cell, x = deep(widths, alpha, activation)
    state, objective = solve(cell, x)
    assert (objective.residual(state) < 1e-9).all()
    assert len(objective.gradient(state)) == len(widths)
    assert objective.is_minimized == (len(widths) <= 2)
    perturbed = state + 0.1 * torch.randn_like(state)
    assert (objective.residual(perturbed) > 1e-3).all()


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_envelope_and_its_gradient_against_numerical_minimization(activation: str) -> None:
    """α M_φ^{1−α}(z) = α min_u φ(u) + ‖z − u‖²/2(1−α), with W invertible so that φ is known."""
    alpha = 0.6
    cell, x = deep((4,), alpha, activation)
    x = x[:1]
    with torch.no_grad():
        context = cell.inject(x)
    unit, part = cell.units()[0], context.parts["0"]
    W, c = part.weights("W")[0].detach(), part["c"].detach()
    block = cell.objective(context).blocks(torch.randn(1, 4, dtype=torch.float64))[0]
    bounds = (0, None) if activation == "relu" else (-1 + 1e-9, 1 - 1e-9)

    def envelope(z: Tensor) -> float:
        def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
            y = torch.from_numpy(flat).view(1, 4).requires_grad_()
            u = y @ W
            phi = (unit.activation.conjugate(y) - c * y).sum() - 0.5 * u.square().sum()
            value = alpha * (phi + (z - u).square().sum() / (2 * (1 - alpha)))
            (gradient,) = torch.autograd.grad(value, y)
            return value.item(), gradient.flatten().numpy()

        options = {"ftol": 1e-16, "gtol": 1e-11}
        return float(
            minimize(
                function, np.full(4, 0.1), jac=True, method="L-BFGS-B",
                bounds=[bounds] * 4, options=options,
            ).fun
        )  # fmt: skip

    z = block.z.detach()
    assert envelope(z) == pytest.approx(block.envelope.item(), abs=1e-9)
    gradient = (block.v - block.z).detach().flatten()
    for i in range(4):
        step = torch.zeros(1, 4, dtype=torch.float64)
        step[0, i] = 1e-4
        numerical = (envelope(z + step) - envelope(z - step)) / 2e-4
        assert numerical == pytest.approx(gradient[i].item(), abs=1e-6)


def test_equilibrium_of_two_layers_minimizes_the_objective_of_corollary_1() -> None:
    """Compare with a numerical minimizer over (y₁, y₂) for invertible W and α = 1."""
    cell, x = deep((4, 4), 1.0, "tanh")
    x = x[:1]
    state, objective = solve(cell, x)
    with torch.no_grad():
        context = cell.inject(x)
    weights = [part.weights("W")[0].detach() for part in context.parts.values()]
    inputs = [part["c"].detach() for part in context.parts.values()]

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        ys = torch.from_numpy(flat).view(2, 1, 4).requires_grad_()
        zs = [y @ W for y, W in zip(ys, weights, strict=True)]
        value = 0.5 * (zs[0] - zs[1]).square().sum()
        for y, z, c in zip(ys, zs, inputs, strict=True):
            value = value + (cell.units()[0].activation.conjugate(y) - c * y).sum()
            value = value - 0.5 * z.square().sum()
        (gradient,) = torch.autograd.grad(value, ys)
        return value.item(), gradient.flatten().numpy()

    result = minimize(
        function, np.full(8, 0.1), jac=True, method="L-BFGS-B",
        bounds=[(-1 + 1e-9, 1 - 1e-9)] * 8, options={"ftol": 1e-16, "gtol": 1e-11, "maxiter": 9999},
    )  # fmt: skip
    assert result.fun == pytest.approx(objective.value(state).item(), abs=1e-9)
    z = torch.from_numpy(result.x).view(2, 1, 4)[1] @ weights[1]
    torch.testing.assert_close(z, state, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*did not converge")
@given(seed=st.integers(0, 2**16), alpha=st.floats(0.1, 1.0), layers=st.integers(1, 2))
def test_objective_of_one_or_two_layers_decreases_in_picard_steps(
    seed: int, alpha: float, layers: int
) -> None:
    cell, x = deep((5, 3)[:layers], alpha, "relu", seed, zeta=0.99)
    layer = eq.EquilibriumLayer(cell=cell, solver=eq.Picard(tolerance=1e-7, max_iterations=40))
    trace = layer.train().solve(x, trace="states").trace
    assert trace is not None
    assert trace.states is not None
    with torch.no_grad():
        objective = layer.objective(x)
        values = torch.stack([objective.value(state) for state in trace.states])
    assert (values.diff(dim=0) <= 1e-12 * values.abs().max()).all()


def test_equilibrium_tends_to_that_of_a_wide_layer_for_small_alpha() -> None:
    """Theorem 3: for α → 0 all blocks tend to y with L·y = Σ W_iᵀσ(W_i y + c_i)."""
    distances = []
    for alpha in (0.5, 0.1, 0.01):
        cell, x = deep((5, 3, 4), alpha)
        with torch.no_grad():
            context = cell.inject(x)
            y = torch.zeros(2, 4, dtype=torch.float64)
            for _ in range(4000):
                y = (
                    sum(
                        unit.lower(unit.lift(y, part), part)
                        for unit, part in zip(cell.units(), context.parts.values(), strict=True)
                    )
                    / 3
                )
        layer = eq.EquilibriumLayer(
            cell=cell, solver=eq.Anderson(tolerance=1e-10, max_iterations=20000), strict=True
        )
        distances.append((layer.solve(x).state - y).norm().item())
    assert distances[0] > 3 * distances[1] > 9 * distances[2]
    assert distances[2] < 0.02


@pytest.mark.parametrize("raw", [-7.3, -1.0, 0.0, 0.005, 0.5, 1.0, 1.4, 1.9995, 3.0, 12.2])
def test_learnable_alpha_stays_in_its_range_with_a_non_zero_gradient(raw: float) -> None:
    layer = UnitLayer(torch.eye(2), torch.eye(2), learnable_alpha=True)
    assert isinstance(layer.raw_alpha, nn.Parameter)
    with torch.no_grad():
        layer.raw_alpha.fill_(raw)
    alpha = layer.alpha
    assert isinstance(alpha, Tensor)
    assert 0.01 - 1e-6 <= alpha.item() <= 1
    (slope,) = torch.autograd.grad(alpha, layer.raw_alpha)
    assert abs(float(slope)) == 1
    if 0.01 < raw < 1.99:
        torch.testing.assert_close(alpha.item(), min(raw, 2 - raw), rtol=0, atol=1e-6)


@pytest.mark.parametrize("goal", [0.05, 0.7, 1.0])
@pytest.mark.parametrize("raw", [-3.0, 0.0, 1.0, 2.5])
def test_learnable_alpha_converges_to_its_target(raw: float, goal: float) -> None:
    layer = UnitLayer(torch.eye(2), torch.eye(2), learnable_alpha=True)
    assert isinstance(layer.raw_alpha, nn.Parameter)
    with torch.no_grad():
        layer.raw_alpha.fill_(raw)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (torch.as_tensor(layer.alpha) - goal).square().backward()
        optimizer.step()
    assert abs(torch.as_tensor(layer.alpha).item() - goal) < 1e-3


def test_alpha_is_a_parameter_only_if_learnable() -> None:
    model = eq.create_model("deep-opteq-small", learnable_alpha=True, alpha=1.0)
    units = model.layer.cell.units()
    assert [torch.as_tensor(unit.alpha).item() for unit in units] == [1.0, 1.0]
    raw = units[0].raw_alpha
    assert isinstance(raw, torch.nn.Parameter)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert raw.grad is not None
    assert raw.grad != 0, "no gradient at alpha = 1"
    with torch.no_grad():
        for value, alpha in ((0.3, 0.3), (1.2, 0.8)):
            raw.fill_(value)
            assert float(units[0].alpha) == pytest.approx(alpha)
    fixed = eq.create_model("deep-opteq-small", alpha=0.5)
    assert not any("alpha" in name for name, _ in fixed.named_parameters())
    with pytest.raises(ValueError, match="alpha must be in"):
        eq.create_model("deep-opteq-small", alpha=0.0)


def test_init_scale_scales_the_initial_norm() -> None:
    norms = []
    for scale in (0.1, 0.5):
        torch.manual_seed(0)
        model = eq.create_model("deep-opteq-small", init_scale=scale)
        norms.append(model.layer.cell.units()[0].W.norm_bound((32, 8, 8)).item())
    assert norms[0] < norms[1]
    assert norms[0] == pytest.approx(norms[1] / 5, rel=1e-4)


def test_no_layers_raise() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        DeepOptEqCell([])


def regularized(
    widths: tuple[int, ...],
    regularizer: Regularizer,
    placement: str,
    gamma: float = 0.1,
) -> tuple[DeepOptEqCell, Tensor]:
    plain, _ = deep(widths, 0.8)
    cell = DeepOptEqCell(
        plain.units(),
        regularizer=regularizer,
        gamma=gamma,
        placement=placement,  # type: ignore[arg-type]
    )
    return cell, torch.randn(4, 3, dtype=torch.float64)


REGULARIZERS = [
    L2(),
    L1(),
    Incay(),
    Decorrelation(),
]


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=str)
@pytest.mark.parametrize("widths", [(5,), (5, 3), (5, 3, 6)])
def test_only_the_exact_placement_is_stationary(
    widths: tuple[int, ...], regularizer: Regularizer
) -> None:
    residuals = {}
    for placement in ("exact", "paper"):
        cell, x = regularized(widths, regularizer, placement)
        state, objective = solve(cell, x)
        residuals[placement] = objective.residual(state)
        last = objective.blocks(state)[-1].z
        error = (last - regularizer.step(last, 0.1)).flatten(1).norm(dim=1)
        if placement == "exact" or len(widths) == 1:
            assert (residuals[placement] < 1e-8).all()
        else:
            # The gradient is (−γ∇R, …, +γ∇R), non-zero in the first and the last block.
            torch.testing.assert_close(residuals[placement], 2**0.5 * error, rtol=1e-6, atol=1e-8)


def test_equilibrium_minimizes_the_objective_with_a_convex_regularizer() -> None:
    """L = 2: Corollary 1's objective plus γR, compared with other outputs of the map."""
    for regularizer in (L2(), L1()):
        cell, x = regularized((5, 3), regularizer, "exact")
        state, objective = solve(cell, x)
        minimum = objective.value(state)
        for _ in range(50):
            other = state + 0.3 * torch.randn_like(state)
            assert (objective.value(other) >= minimum - 1e-10).all()


def test_feature_is_the_proximal_point() -> None:
    cell, x = regularized((5, 3), L1(), "exact", gamma=0.3)
    layer = eq.EquilibriumLayer(cell=cell, solver=SOLVER)
    with torch.no_grad():
        feature, state = layer(x), layer.solve(x).state
    torch.testing.assert_close(feature, L1().proximal(state, 0.3), rtol=1e-9, atol=1e-9)
    assert (feature == 0).any()
    assert layer.contraction_bound(x) is None
    with pytest.raises(ValueError, match="placement"):
        regularized((5,), L2(), "middle")


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=str)
def test_feature_of_the_papers_placement_is_that_of_an_appended_layer(
    regularizer: Regularizer,
) -> None:
    """w = T_R∘f_L∘…∘f_1(w)."""
    cell, x = regularized((5, 3, 6), regularizer, "paper")
    plain = DeepOptEqCell(cell.units())
    layer = eq.EquilibriumLayer(cell=cell, solver=SOLVER)
    with torch.no_grad():
        w = layer(x)
        mapped = plain.step(w, plain.inject(x))
        assert isinstance(mapped, Tensor)
        torch.testing.assert_close(regularizer.step(mapped, 0.1), w, rtol=1e-8, atol=1e-9)
        # The appended layer decreases R.
        before, after = (regularizer.value(z).sum() for z in (layer.solve(x).state, w))  # type: ignore[arg-type]
        assert after < before


def test_regularized_model_has_finite_gradients() -> None:
    model = eq.create_model(
        "deep-opteq-small", channels=6, widths=(4, 5), regularizer=L2(), gamma=0.05
    ).double()
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    model(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def steep(
    regularizer: Regularizer, form: str, dtype: torch.dtype, gamma: float = 0.1
) -> tuple[eq.EquilibriumLayer, Tensor]:
    """Build a layer near its norm bound with weak features, and five inputs."""
    torch.manual_seed(0)

    def operator(width: int) -> eq.Conv2d:
        W = eq.Conv2d(6, width, 3, norm="bound", zeta=0.9)
        with torch.no_grad():
            W.kernel.mul_(6)
        return W

    cell: DeepOptEqCell | eq.EnergyCell
    if form == "y":
        W = operator(8)
        energy = eq.Input(eq.Conv2d(3, 8, 3)) + eq.Quadratic(W)
        cell = eq.EnergyCell(energy + eq.FeatureRegularizer(W, regularizer, gamma), "tanh")
    else:
        units = [UnitLayer(operator(w), eq.Conv2d(3, w, 1), activation="tanh") for w in (6, 8, 8)]
        cell = DeepOptEqCell(units, regularizer=regularizer, gamma=gamma, placement=form)  # type: ignore[arg-type]
    solver = eq.Auto(tolerance=1e-5 if dtype == torch.float32 else 1e-12)
    layer = eq.EquilibriumLayer(cell=cell, solver=solver, gradient=eq.Implicit(tolerance=1e-12))
    return layer.to(dtype), 0.5 * torch.randn(5, 3, 6, 6, dtype=dtype)


@pytest.mark.parametrize("regularizer", [Decorrelation(), HSIC()], ids=str)
@pytest.mark.parametrize("form", ["y", "exact", "paper"])
def test_small_batches_converge_with_exact_gradients(regularizer: Regularizer, form: str) -> None:
    layer, x = steep(regularizer, form, torch.float32)
    assert layer.solve(x).converged.all()
    layer, x = steep(regularizer, form, torch.float64)
    assert layer.solve(x).converged.all()
    assert layer.solve(x).evaluations < 60
    x.requires_grad_()
    (exact,) = torch.autograd.grad(layer(x).square().sum(), x)
    direction = torch.randn_like(x)
    with torch.no_grad():
        up, down = (layer(x + s * 1e-5 * direction).square().sum() for s in (1, -1))
    torch.testing.assert_close((exact * direction).sum(), (up - down) / 2e-5, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [Decorrelation, HSIC])
def test_solve_without_epsilon_fails_with_advice(kind: type[Decorrelation | HSIC]) -> None:
    """The force on a channel grows like one over its size."""
    for epsilon in (0.0, 0.1):
        layer, x = steep(kind(epsilon=epsilon), "exact", torch.float32)
        with eq.solving(layer, strict=True):
            if epsilon:
                assert layer.train().solve(x).converged.all()
                continue
            with pytest.raises(eq.ConvergenceError, match="raise epsilon to gamma or lower gamma"):
                layer.train().solve(x)


def test_iteration_can_start_at_the_input() -> None:
    """Algorithm 1: z₀ = x, of which much remains after K steps if α is small."""
    torch.manual_seed(0)
    make = {"channels": 4, "widths": (4, 4), "in_channels": 1, "alpha": 0.01, "pool": 2}
    rule = {"name": "unrolled", "steps": 3}
    model = eq.create_model("deep-opteq-small", **make, gradient=rule, z0="input").double()
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    x = model.injected(images)
    context = model.layer.cell.inject(x)
    z = x
    for _ in range(3):
        z = model.layer.cell.step(z, context)
    torch.testing.assert_close(model.features(images), z)
    (gradient,) = torch.autograd.grad(model.layer(x).sum(), x)
    assert float(gradient.abs().mean()) > 0.5, "the gradient through z₀ is missing"
    with pytest.raises(ValueError, match="z0 must be one of zero, input"):
        eq.create_model("deep-opteq-small", z0="one")


@given(seed=st.integers(0, 2**31), alpha=st.floats(0.1, 1), mu=st.floats(1, 3))
def test_slope_along_a_direction_is_an_upper_bound(seed: int, alpha: float, mu: float) -> None:
    torch.manual_seed(seed)
    W, U = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    layer = UnitLayer(W, U, alpha=alpha, mu=mu).double()
    shapes = ((4,),)
    context = layer.inject(torch.randn(1, 3).double()).with_shared(layer.prepare(shapes))
    g, start, other = torch.randn(3, 16, 4).double()
    with torch.no_grad():
        slope = layer.slope_along(g, context, shapes)
        near = start + 1e-3 * (other - start)  # the local slope as well as a secant
        for end in (other, near):
            moved = (g * (layer(start, context) - layer(end, context))).sum(dim=1).abs()
            assert (moved <= slope * (start - end).norm(dim=1) * (1 + 1e-9)).all()
        bound = layer.lipschitz_bound(context, shapes) * g.norm(dim=1)
    assert (slope <= bound * (1 + 1e-9)).all()
