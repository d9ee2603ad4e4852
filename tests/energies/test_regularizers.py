"""Feature regularizers: the operators of Table 2 and Theorem 4."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.energies.regularizers import (
    HSIC,
    L1,
    L2,
    Decorrelation,
    FeatureRegularizer,
    Incay,
    Regularizer,
)

SMOOTH_HSIC = [HSIC(), HSIC(bandwidth=0.5), HSIC(features=8, seed=3)]
BATCH: list[Regularizer] = [Decorrelation(), *SMOOTH_HSIC]
REGULARIZERS: list[Regularizer] = [L2(), L1(), Incay(), Incay(epsilon=0.2), *BATCH]
MEDIAN: list[Regularizer] = [HSIC("median"), HSIC("median", features=5)]
PAPER: list[Regularizer] = [
    Incay(scale="batch"),
    Decorrelation(scale="batch", epsilon=0.0),
    HSIC(scale="batch", epsilon=0.0),
    HSIC("median", scale="batch", epsilon=0.0),
]
SOLVER = eq.Anderson(tolerance=1e-13, max_iterations=5000)


@pytest.mark.parametrize("regularizer", [*REGULARIZERS, *MEDIAN, *PAPER], ids=str)
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3, 2)])
def test_gradient_is_that_of_the_value(regularizer: Regularizer, shape: tuple[int, ...]) -> None:
    z = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    value = regularizer.value(z)
    assert value.shape == (() if regularizer.couples_batch else (5,))
    (expected,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(regularizer.gradient(z), expected, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(regularizer.gradient, z)


@pytest.mark.parametrize("regularizer", [L2(), L1()], ids=str)
def test_proximal_operator_is_a_minimizer(regularizer: Regularizer) -> None:
    z = torch.randn(1, 6, dtype=torch.float64)
    gamma = 0.4
    minimizer = regularizer.proximal(z, gamma)
    assert minimizer is not None

    def objective(u: Tensor) -> Tensor:
        return gamma * regularizer.value(u) + 0.5 * (u - z).square().sum(dim=1)

    for radius in (1e-4, 1e-2, 1.0):
        others = minimizer + radius * torch.randn(200, 6, dtype=torch.float64)
        assert (objective(others) >= objective(minimizer) - 1e-12).all()


def test_steps_are_the_corrected_operators_of_table_2() -> None:
    z = torch.randn(3, 4, dtype=torch.float64)
    gamma, epsilon = 0.3, 1.0
    torch.testing.assert_close(L2().step(z, gamma), z / 1.3)
    torch.testing.assert_close(L1().step(z, gamma), z - z.clamp(-gamma, gamma))
    size = z.square().sum(dim=1, keepdim=True) + 2 * epsilon
    # The paper has a minus sign, which would shrink the feature.
    incay = Incay(scale="batch")
    torch.testing.assert_close(incay.step(z, gamma), (1 + 4 * gamma / size.square()) * z)
    assert (incay.step(z, gamma).norm(dim=1) > z.norm(dim=1)).all()
    assert (Incay().step(z, gamma).norm(dim=1) > z.norm(dim=1)).all()
    # Decorrelation, row by row (rows are features): z_i − 2γ (I − P_i) Σ_{j≠i} P_j z_i/‖z_i‖².
    rows = z.T
    projections = [torch.outer(r, r) / r.square().sum() for r in rows]
    identity = torch.eye(3, dtype=torch.float64)
    for i, row in enumerate(rows):
        others = sum(p for j, p in enumerate(projections) if j != i)
        expected = row - 2 * gamma * (identity - projections[i]) @ others @ row / row.square().sum()
        step = Decorrelation(scale="batch", epsilon=0.0).step(z, gamma)
        torch.testing.assert_close(step[:, i], expected)


def test_decorrelation_has_zero_gradient_in_zero_channels() -> None:
    z = torch.randn(4, 3, dtype=torch.float64)
    z[:, 1] = 0
    for regularizer in (Decorrelation(), Decorrelation(epsilon=0.0)):
        assert regularizer.value(z).isfinite()
        gradient = regularizer.gradient(z)
        assert gradient.isfinite().all()
        assert (gradient[:, 1] == 0).all()


@pytest.mark.parametrize("bandwidth", [0.7, "deviation", "median"])
def test_hsic_is_the_sum_over_pairs_of_channels(bandwidth: float | str) -> None:
    B, m = 6, 4
    z = torch.randn(B, m, 3, 2, dtype=torch.float64)
    rows = z.mean(dim=(2, 3)).T
    H = torch.eye(B, dtype=torch.float64) - 1 / B
    kernels = []
    for row in rows:
        distances = (row[:, None] - row).abs()
        if bandwidth == "median":
            scale = torch.tensor([distances[a, b] for a, b in combinations(range(B), 2)]).median()
        elif bandwidth == "deviation":
            scale = row.std() * torch.special.ndtri(torch.tensor(0.75)).double() * 2**0.5
        else:
            scale = torch.tensor(bandwidth)
        kernels.append(torch.exp(-(distances**2) / (2 * scale**2)))
    expected = sum(torch.trace(a @ H @ b @ H) for a, b in combinations(kernels, 2)) / (B - 1) ** 2
    hsic = HSIC(bandwidth, scale="batch", epsilon=0.0)  # type: ignore[arg-type]
    torch.testing.assert_close(hsic.value(z), expected, rtol=1e-6, atol=0)
    average = HSIC(bandwidth, epsilon=0.0).value(z) / z.numel()  # type: ignore[arg-type]
    torch.testing.assert_close(average, expected / m**2, rtol=1e-6, atol=0)


def test_hsic_gradient_at_a_fixed_bandwidth_is_that_of_table_2() -> None:
    B, m, s = 5, 3, 0.6
    z = torch.randn(B, m, dtype=torch.float64)
    H = torch.eye(B, dtype=torch.float64) - 1 / B
    differences = z.T[:, :, None] - z.T[:, None, :]
    K = torch.exp(-(differences**2) / (2 * s**2))
    centered = H @ K @ H
    product = (centered.sum(dim=0) - centered) * K * differences
    expected = -2 / (s**2 * (B - 1) ** 2) * product.sum(dim=2)
    gradient = HSIC(bandwidth=s, scale="batch").gradient(z)
    torch.testing.assert_close(gradient, expected.T, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"bandwidth": "median"}, {"features": 7}], ids=str)
def test_hsic_is_invariant_to_scaling_and_shifting_channels(options: dict[str, Any]) -> None:
    regularizer = HSIC(epsilon=0.0, **options)
    z = torch.randn(7, 3, dtype=torch.float64)
    scales = torch.tensor([1e-3, 1.0, 1e4], dtype=torch.float64)
    value = regularizer.value(z)
    torch.testing.assert_close(regularizer.value(z * scales + 5), value, rtol=1e-8, atol=0)
    gradient = regularizer.gradient(z)
    assert (gradient.sum(dim=0).abs() < 1e-12).all()
    assert ((gradient * z).sum(dim=0).abs() < 1e-12).all()
    # With a constant bandwidth, shrinking features lowers the value.
    assert HSIC(bandwidth=1.0).value(0.01 * z) < 1e-6 * HSIC(bandwidth=1.0).value(z)


def test_hsic_detects_dependence_without_correlation() -> None:
    a = torch.linspace(-2, 2, 200, dtype=torch.float64)
    noise = torch.randn(200, dtype=torch.float64)
    dependent, independent = (torch.stack([a, b], dim=1) for b in (a.square(), noise))
    assert abs(torch.corrcoef(dependent.T)[0, 1]) < 1e-12
    assert HSIC().value(dependent) > 20 * HSIC().value(independent)


def test_random_features_converge_to_the_kernel() -> None:
    z = torch.randn(20, 5, dtype=torch.float64)
    exact = HSIC().value(z)
    errors = []
    for count in (4, 32, 256):
        values = [HSIC(features=count, seed=seed).value(z) for seed in range(10)]
        errors.append(float(torch.stack([(v - exact).abs() for v in values]).mean() / exact))
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert errors[2] < 0.01


@pytest.mark.parametrize(("batch", "channels"), [(3, 5), (30, 3), (50, 2)])
def test_random_features_replace_the_kernel_by_a_mean_of_cosines(batch: int, channels: int) -> None:
    """The shapes cover both choices of the smaller Gram matrix."""
    z = torch.randn(batch, channels, dtype=torch.float64)
    approximate = HSIC(bandwidth=1.0, features=7, scale="batch")
    omega = torch.tensor(approximate.frequencies, dtype=torch.float64)
    H = torch.eye(batch, dtype=torch.float64) - 1 / batch
    kernels = [torch.cos((c[:, None] - c)[..., None] * omega).mean(dim=2) for c in z.T]
    pairs = combinations(kernels, 2)
    expected = sum(torch.trace(a @ H @ b @ H) for a, b in pairs) / (batch - 1) ** 2
    torch.testing.assert_close(approximate.value(z), expected, rtol=1e-10, atol=1e-12)
    (slope,) = torch.autograd.grad(approximate.value(z.requires_grad_()), z)
    torch.testing.assert_close(approximate.gradient(z), slope, rtol=1e-10, atol=1e-12)


def test_random_features_are_determined_by_the_seed() -> None:
    z = torch.randn(6, 3)
    regularizer = HSIC(features=5, seed=1)
    for same in (
        HSIC(features=5, seed=1),
        copy.deepcopy(regularizer),
        pickle.loads(pickle.dumps(regularizer)),
    ):
        assert same == regularizer
        assert hash(same) == hash(regularizer)
        assert torch.equal(same.value(z), regularizer.value(z))
    assert HSIC(features=5, seed=2) != regularizer
    assert not torch.equal(HSIC(features=5, seed=2).value(z), regularizer.value(z))
    with torch.device("meta"):
        assert HSIC(features=5, seed=1).frequencies == regularizer.frequencies


@pytest.mark.parametrize("regularizer", [*BATCH, *MEDIAN, *PAPER[1:]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_degenerate_batches_have_finite_values_and_gradients(
    regularizer: Regularizer, dtype: torch.dtype
) -> None:
    z = torch.randn(6, 4).to(dtype)
    z[:, 1] = 0
    z[:, 2] = 0.1
    sparse = torch.zeros(8, 4).to(dtype)
    sparse[0], sparse[1, 2] = 1, 2
    for batch in (z, sparse, torch.zeros_like(z), z[:1], z[:0], z[:0, :, None, None], 1e-30 * z):
        assert regularizer.value(batch).isfinite()
        gradient = regularizer.gradient(batch)
        assert gradient.shape == batch.shape
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
    if isinstance(regularizer, HSIC):
        assert regularizer.value(z[:1]) == 0
        summed = replace(regularizer, scale="batch")
        remaining = summed.value(z[:, [0, 3]])
        torch.testing.assert_close(summed.value(z), remaining, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("regularizer", BATCH, ids=str)
def test_autocast_does_not_affect_regularizers(regularizer: Regularizer) -> None:
    z = torch.randn(9, 5)
    value, gradient = regularizer.value(z), regularizer.gradient(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(regularizer.value(z), value)
        assert torch.equal(regularizer.gradient(z), gradient)


def layer(
    regularizer: Regularizer, gamma: float, step: str = "auto", gradient: Any = "auto"
) -> eq.EquilibriumLayer:
    torch.manual_seed(0)
    W = eq.Dense(4, 6, norm="bound", zeta=0.8).double()
    with torch.no_grad():
        W.kernel.mul_(4)
    energy = eq.Input(eq.Dense(3, 6).double()) + eq.Quadratic(W)
    if gamma:
        energy = energy + FeatureRegularizer(W, regularizer, gamma, step)  # type: ignore[arg-type]
    return eq.EquilibriumLayer(energy, solver=SOLVER, gradient=gradient, strict=True)


def feature(run: eq.EquilibriumLayer, x: Tensor) -> Tensor:
    with torch.no_grad():
        quadratic = run.cell.energy["quadratic"]  # type: ignore[union-attr, index, operator]
        return quadratic.W.adjoint(run(x))


@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=str)
@pytest.mark.parametrize("step", ["auto", "gradient"])
def test_theorem_4_the_equilibrium_is_stationary_for_the_sum(
    regularizer: Regularizer, step: str
) -> None:
    """The equilibrium is a fixed point of the paper's map z* = f(z* − γ∇R(z*)), or f∘prox."""
    if isinstance(regularizer, L1) and step == "gradient":
        step = "proximal"  # its gradient is discontinuous at zero
    gamma = 0.1
    run = layer(regularizer, gamma, step)
    x = torch.randn(5, 3, dtype=torch.float64)
    state = run.solve(x).state
    assert (run.objective(x).residual(state) < 1e-9).all()
    energy = run.cell.energy  # type: ignore[union-attr]
    inject, quadratic, term = (term for _, term in energy.named_terms())  # type: ignore[operator, union-attr]
    W = quadratic.W
    with torch.no_grad():
        z = W.adjoint(state)
        if step == "gradient":
            moved = z - gamma * regularizer.gradient(z)
        else:
            moved = regularizer.step(z, gamma)
        mapped = W.adjoint((W(moved) + inject.inject(x)["c"]).relu())
    torch.testing.assert_close(mapped, z, rtol=1e-9, atol=1e-9)
    assert term.facts.couples_batch == regularizer.couples_batch


def test_regularizers_have_their_intended_effect_on_features() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    plain = feature(layer(L2(), 0.0), x)
    assert (feature(layer(L2(), 0.5), x).norm(dim=1) < plain.norm(dim=1)).all()
    assert (feature(layer(Incay(epsilon=0.1), 0.01), x).norm(dim=1) >= plain.norm(dim=1)).all()
    decorrelated = feature(layer(Decorrelation(), 0.05), x)
    assert Decorrelation().value(decorrelated) < Decorrelation().value(plain)
    gamma = 0.2
    sparse = feature(layer(L1(), gamma), x)
    # z* itself is not sparse; its proximal point is.
    assert (sparse == 0).sum() == 0
    assert (L1().proximal(sparse, gamma) == 0).sum() > 0


def test_hsic_makes_features_less_dependent() -> None:
    x = torch.randn(24, 3, dtype=torch.float64)
    plain = feature(layer(HSIC(), 0.0), x)
    independent = feature(layer(HSIC(), 5.0), x)
    assert HSIC().value(independent) < 0.95 * HSIC().value(plain)


@pytest.mark.filterwarnings("ignore:.*did not converge")
def test_iterations_converge_with_the_deviation_but_not_with_the_median() -> None:
    """The gradient of the sample median is discontinuous, so no step is small enough."""
    x = torch.randn(24, 3, dtype=torch.float64)
    for bandwidth, converges in (("deviation", True), ("median", False)):
        run = layer(HSIC(bandwidth), 0.5).train()  # type: ignore[arg-type]
        solver = eq.Picard(tolerance=1e-8, max_iterations=300)
        with eq.solving(run, solver=solver, strict=False):
            assert bool(run.solve(x).converged) == converges


@pytest.mark.parametrize("regularizer", BATCH, ids=str)
def test_a_coupled_regularizer_makes_the_batch_one_problem(regularizer: Regularizer) -> None:
    run = layer(regularizer, 0.05)
    x = torch.randn(5, 3, dtype=torch.float64)
    solution = run.solve(x)
    assert solution.status.shape == (1,)
    alone = run.solve(x[:1])
    assert not torch.allclose(alone.state[0], solution.state[0], atol=1e-6)  # type: ignore[index]


@pytest.mark.parametrize("regularizer", [L2(), L1(), Incay(), *BATCH], ids=str)
def test_gradients_through_a_regularized_equilibrium(regularizer: Regularizer) -> None:
    run = layer(regularizer, 0.1, gradient=eq.Implicit(tolerance=1e-12))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(run(x).square().sum(), x)
    direction = torch.randn_like(x)
    step = 1e-6
    with torch.no_grad():
        up, down = (run(x + s * step * direction).square().sum() for s in (1, -1))
    torch.testing.assert_close(
        (exact * direction).sum(), (up - down) / (2 * step), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("regularizer", SMOOTH_HSIC, ids=str)
def test_second_derivatives_through_an_equilibrium_with_hsic(regularizer: HSIC) -> None:
    torch.manual_seed(0)
    W = eq.Dense(2, 3, norm="bound", zeta=0.7).double()
    U = torch.randn(3, 2, dtype=torch.float64)
    energy = eq.Input(U) + eq.Quadratic(W) + FeatureRegularizer(W, regularizer, 0.1)
    gradient = eq.Implicit(tolerance=1e-12)
    run = eq.EquilibriumLayer(energy, activation="tanh", solver=SOLVER, gradient=gradient)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def test_invalid_options_raise() -> None:
    W = torch.eye(3)
    with pytest.raises(ValueError, match="bandwidth must be a number"):
        HSIC("mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        HSIC(bandwidth=0.0)
    with pytest.raises(ValueError, match="features"):
        HSIC(features=0)
    with pytest.raises(ValueError, match="gamma"):
        FeatureRegularizer(W, L2(), -1.0)
    with pytest.raises(ValueError, match="no proximal operator"):
        FeatureRegularizer(W, Incay(), 0.1, "proximal")
    with pytest.raises(ValueError, match="step must be"):
        FeatureRegularizer(W, L2(), 0.1, "newton")  # type: ignore[arg-type]
    for kind, epsilon in ((Incay, 0.0), (Decorrelation, -0.1), (HSIC, -0.1)):
        with pytest.raises(ValueError, match="epsilon"):
            kind(epsilon=epsilon)  # type: ignore[operator]
        with pytest.raises(ValueError, match="scale must be one of number, batch"):
            kind(scale="sample")  # type: ignore[operator]


@pytest.mark.parametrize("samples", [3, 40])
def test_decorrelation_of_entries_is_equation_13(samples: int) -> None:
    """The sample counts cover both choices of the smaller Gram matrix."""
    z = torch.randn(samples, 2, 3, 2, dtype=torch.float64)
    z[:, 1, 2, 0] = 0
    rows = z.flatten(1).T
    lengths = rows.norm(dim=1, keepdim=True)
    unit = rows / torch.where(lengths > 0, lengths, 1.0)
    expected = 0.5 * (unit @ unit.T - torch.eye(12, dtype=torch.float64)).square().sum()
    paper = Decorrelation(rows="entries", scale="batch", epsilon=0.0)
    # Without the diagonal, as in Table 2; the zero row contributes ½ to `expected`.
    torch.testing.assert_close(paper.value(z), expected - 0.5)
    flat = z.flatten(1)
    torch.testing.assert_close(
        Decorrelation(rows="entries").gradient(flat), Decorrelation().gradient(flat)
    )
    with pytest.raises(ValueError, match="rows must be one of channels, entries"):
        Decorrelation(rows="pixels")  # type: ignore[arg-type]


@pytest.mark.parametrize("regularizer", [L1(), L2(), Incay(), Decorrelation(), HSIC()], ids=str)
def test_gradients_do_not_depend_on_the_image_size(regularizer: Regularizer) -> None:
    z = torch.randn(6, 4, 2, 3, dtype=torch.float64)
    tiled = regularizer.gradient(z.tile(1, 1, 2, 2))
    torch.testing.assert_close(tiled, regularizer.gradient(z).tile(1, 1, 2, 2))


@pytest.mark.parametrize("regularizer", [L1(), L2(), Incay(), Decorrelation(), HSIC()], ids=str)
def test_gradients_do_not_depend_on_the_batch_size(regularizer: Regularizer) -> None:
    """Repeating all samples leaves the gradient unchanged (for HSIC up to the factor (B−1)²)."""
    z = torch.randn(60, 4, dtype=torch.float64)
    once, twice = regularizer.gradient(z), regularizer.gradient(z.tile(2, 1))[:60]
    assert (once - twice).norm() < (0.1 if isinstance(regularizer, HSIC) else 1e-9) * once.norm()
    if not isinstance(regularizer, L1 | L2):
        assert isinstance(regularizer, Incay | Decorrelation | HSIC)
        paper = replace(regularizer, scale="batch")
        ratio = paper.gradient(z).norm() / paper.gradient(z.tile(2, 1))[:60].norm()
        assert abs(ratio - (2 if regularizer.couples_batch else 1)) < 0.2


def ill_conditioned(samples: int, channels: int, seed: int) -> Tensor:
    """Return nearly parallel channels with very different norms."""
    draw = torch.Generator().manual_seed(seed)
    common, sizes, noise = (
        torch.randn(*shape, generator=draw, dtype=torch.float64)
        for shape in ((samples, 1), (channels,), (samples, channels))
    )
    return (common.sign() if seed % 2 else common) * (2 * sizes).exp() + 0.1 * noise


@pytest.mark.parametrize("seed", range(8))
def test_curvature_is_bounded_by_epsilon(seed: int) -> None:
    """z − γ∇R(z) is non-expansive only for γL ≤ 2; without ε no γ satisfies this."""

    def curvature(regularizer: Regularizer, z: Tensor) -> Tensor:
        hessian = torch.autograd.functional.hessian(lambda z: regularizer.value(z).sum(), z)
        values: Tensor = torch.linalg.eigvalsh(hessian.reshape(z.numel(), z.numel()))
        return values

    epsilon = 0.3
    z = ill_conditioned(6, 4, seed)
    for regularizer, largest in (
        (Decorrelation(epsilon=epsilon), 2 / epsilon),
        (HSIC(epsilon=epsilon), 1.5 / epsilon),
        (Incay(epsilon=epsilon), 1 / epsilon**2),
    ):
        values = curvature(regularizer, z)
        assert values[-1] < largest
        assert values[0] > -largest
    for regularizer in (Decorrelation(epsilon=0.0), HSIC(epsilon=0.0)):
        torch.testing.assert_close(
            curvature(regularizer, 0.01 * z)[-1], 1e4 * curvature(regularizer, z)[-1]
        )
