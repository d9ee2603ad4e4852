"""The Gaussian, polynomial and sigmoid kernels: derivatives, curvature, γ, Proposition 1."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import equilibria as eq
from equilibria.context import Context
from equilibria.context.state import Packing
from equilibria.energies import Branches, HeritageDiversity
from equilibria.energies.gaussian import GaussianKernel, Patches
from equilibria.energies.kernel_scale import (
    FixedScale,
    PerSampleScale,
    RunningScale,
    StepScale,
    kernel_scale,
)
from equilibria.energies.kernels import PolynomialKernel, SigmoidKernel

LOWEST = -2 * math.exp(-1.5)
"""Smallest eigenvalue of ∇²(−e^{−γ‖q‖²}/2γ), for every γ."""


def gaussian(
    *,
    channels: int = 3,
    mid: int = 4,
    split: int = 2,
    patch: int | None = 2,
    hidden: int | None = None,
    gamma: str | float = 0.3,
    norm: str | None = None,
) -> GaussianKernel:
    W_h = None
    if hidden is not None:
        assert patch is not None
        W_h = eq.Dense(split * patch**2, hidden, norm=norm, zeta=0.8)
    kernel = GaussianKernel(
        eq.Conv2d(2, mid, 1),
        eq.Conv2d(channels, mid, 3, norm=norm, zeta=0.9),
        W_h,
        channel_split=split,
        patch=patch,
        gamma=gamma,
    )
    return kernel.double()


def dense(n: int = 4, m: int = 5, gamma: str | float = 0.4) -> GaussianKernel:
    return GaussianKernel(eq.Dense(3, m), eq.Dense(n, m), patch=None, gamma=gamma).double()


def context_of(energy: eq.Energy, x: Tensor) -> Context:
    context = energy.inject(x)
    start = energy.initial_state(context)
    assert start is not None
    return energy.complete(context, Packing.of(start).layout)


def images(batch: int = 3, height: int = 4, width: int = 4) -> Tensor:
    return torch.randn(batch, 2, height, width, dtype=torch.float64)


def state_for(energy: eq.Energy, context: Context) -> Tensor:
    start = energy.initial_state(context)
    assert isinstance(start, Tensor)
    return torch.randn(start.shape, dtype=start.dtype)


def assert_descent(energy: eq.Energy, y: Tensor, context: Context) -> None:
    leaf = y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy.value(leaf, context).sum(), leaf)
    torch.testing.assert_close(energy.descent(y, context), -gradient, rtol=1e-10, atol=1e-10)


def hessian(energy: eq.Energy, y: Tensor, context: Context, sample: int = 0) -> Tensor:
    """Return ∇²E of one sample as the Jacobian of −descent."""
    single = context.keep(torch.tensor([sample]))

    def descent(v: Tensor) -> Tensor:
        image = energy.descent(v.view_as(y[:1]), single)
        assert isinstance(image, Tensor)
        return -image.flatten()

    result = torch.autograd.functional.jacobian(descent, y[sample].flatten())
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("gamma", [0.3, "running", "per-sample"])
@pytest.mark.parametrize("patch", [None, 1, 2, 3])
@pytest.mark.parametrize("hidden", [None, 2, 20])
@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 1)])
def test_gaussian_descent_is_minus_the_gradient(
    gamma: str | float, patch: int | None, hidden: int | None, size: tuple[int, int]
) -> None:
    if patch is None and hidden is not None:
        return
    energy = gaussian(gamma=gamma, patch=patch, hidden=hidden, norm="bound", mid=5)
    context = context_of(energy, images(3, *size))
    y = state_for(energy, context)
    assert energy.value(y, context).shape == (3,)
    assert_descent(energy, y, context)
    last = y.contiguous(memory_format=torch.channels_last)
    c = context["c"].contiguous(memory_format=torch.channels_last)
    image = energy.descent(last, context.with_sample(c=c))
    torch.testing.assert_close(image, energy.descent(y, context), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gamma", [0.4, "running", "per-sample"])
def test_gaussian_descent_of_vectors_is_equation_6(gamma: str | float) -> None:
    """−∇E = e^{−γ‖r‖²} Wᵀr, r = Ux + b − Wy."""
    energy = dense(gamma=gamma)
    context = context_of(energy, torch.randn(3, 3, dtype=torch.float64))
    y = state_for(energy, context)
    assert_descent(energy, y, context)
    assert isinstance(energy.W, eq.Dense)
    r = context["c"] - y @ energy.W.weight.T
    weight = torch.exp(-context["gamma"] * r.square().sum(dim=1, keepdim=True))
    torch.testing.assert_close(energy.descent(y, context), weight * r @ energy.W.weight)


@pytest.mark.parametrize("hidden", [2, 9])
def test_a_single_whole_state_patch_can_be_projected(hidden: int) -> None:
    energy = GaussianKernel(
        eq.Dense(3, 5), eq.Dense(4, 5), eq.Dense(5, hidden), patch=None, gamma=0.4
    ).double()
    context = context_of(energy, torch.randn(3, 3, dtype=torch.float64))
    y = state_for(energy, context)
    assert_descent(energy, y, context)
    assert energy.attention(y, context).shape == (3, 1, 1, 1)


def test_gamma_of_the_paper_couples_the_batch_and_is_detached() -> None:
    """γ = 0.2/min‖q‖² over the batch at the current state."""
    energy = gaussian(gamma="paper", hidden=20)
    assert energy.facts.couples_batch
    context = context_of(energy, images())
    y = state_for(energy, context)
    assert energy.value(y, context).shape == ()
    assert_descent(energy, y, context)
    assert energy.attention(y, context).max().item() == pytest.approx(math.exp(-0.2))
    assert not torch.allclose(
        energy.descent(y, context)[:1],
        energy.descent(y[:1], context.keep(torch.tensor([0]))),
        rtol=1e-6,
    )


@pytest.mark.parametrize("gamma", [0.3, "running", "per-sample"])
def test_samples_are_independent(gamma: str | float) -> None:
    energy = gaussian(gamma=gamma, hidden=20).eval()
    x = images(4)
    x[2] *= 30
    context = context_of(energy, x)
    y = state_for(energy, context)
    for i in range(4):
        alone = context_of(energy, x[i : i + 1])
        single = y[i : i + 1]
        torch.testing.assert_close(energy.value(single, alone)[0], energy.value(y, context)[i])
        torch.testing.assert_close(energy.descent(single, alone)[0], energy.descent(y, context)[i])


def test_patches_contain_adjacent_channels_and_pixels() -> None:
    r = torch.randn(2, 6, 4, 6, dtype=torch.float64)
    for layout in (torch.contiguous_format, torch.channels_last):
        patches = Patches(3, 2)
        blocks = patches.split(r.contiguous(memory_format=layout))
        assert blocks.shape == (2, 2, 3, 2, 2, 2, 3)
        for row in range(2):
            for column in range(3):
                for group in range(2):
                    expected = r[
                        :,
                        3 * group : 3 * group + 3,
                        2 * row : 2 * row + 2,
                        2 * column : 2 * column + 2,
                    ]
                    patch = blocks[:, row, column, group].permute(0, 3, 1, 2)
                    assert torch.equal(patch, expected)
        like = r.contiguous(memory_format=layout)
        merged = patches.merge(blocks, like)
        assert torch.equal(merged, r)
        assert merged.stride() == like.stride()


@pytest.mark.parametrize("shape", [(5, 3, 7), (1, 1, 1), (4, 4, 4)])
def test_maps_are_padded_with_zeros_to_whole_patches(
    shape: tuple[int, int, int],
) -> None:
    r = torch.randn(2, *shape, dtype=torch.float64)
    patches = Patches(4, 2)
    blocks = patches.split(r)
    torch.testing.assert_close(blocks.square().sum(), r.square().sum())
    assert torch.equal(patches.merge(blocks, r), r)


def test_eigenvalues_of_the_kernel_for_every_gamma() -> None:
    """They lie in [−2e^{−3/2}, 1]; the ends are attained at γ‖q‖² = 3/2 and at q = 0."""
    lowest, highest = [], []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        gamma = 10 ** (4 * torch.rand((), generator=generator).item() - 2)
        energy = GaussianKernel(torch.eye(4), torch.eye(4), patch=None, gamma=gamma).double()
        q = torch.randn(1, 4, generator=generator, dtype=torch.float64)
        size = 4 * torch.rand((), generator=generator).item()
        size = {0: 1.5, 1: 0.0}.get(seed, size)  # γ‖q‖²
        q *= math.sqrt(size / gamma) / q.norm()
        H = hessian(energy, torch.zeros(1, 4, dtype=torch.float64), context_of(energy, q))
        torch.testing.assert_close(H, H.T, rtol=1e-10, atol=1e-10)
        values = torch.linalg.eigvalsh(H)
        lowest.append(values[0].item())
        highest.append(values[-1].item())
    assert min(lowest) == pytest.approx(LOWEST, abs=1e-9)
    assert max(highest) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("hidden", [None, 3, 20])
@pytest.mark.parametrize("gamma", [0.02, 0.5, 10.0])
def test_gaussian_curvature_bound_holds_for_dense_hessians(
    hidden: int | None, gamma: float
) -> None:
    energy = gaussian(hidden=hidden, gamma=gamma)
    context = context_of(energy, images(2, 3, 4))
    y = state_for(energy, context) * 0.3
    bound = energy.bounds(context, Packing.of(y).layout).curvature.item()
    for i in range(2):
        H = hessian(energy, y, context, i)
        torch.testing.assert_close(H, H.T, rtol=1e-10, atol=1e-10)
        values = torch.linalg.eigvalsh(H)
        assert values[-1] <= bound * (1 + 1e-9)
        assert values[0] >= LOWEST * bound * (1 + 1e-9)


def test_gaussian_curvature_limit_follows_from_norm_control() -> None:
    energy = gaussian(hidden=20, norm="bound")
    assert energy.limits.curvature == pytest.approx((0.9 * 0.8) ** 2)
    context = context_of(energy, images())
    layout = Packing.of(state_for(energy, context)).layout
    assert energy.bounds(context, layout).curvature <= (0.9 * 0.8) ** 2 * (1 + 1e-9)
    assert gaussian(hidden=20).limits.curvature is None
    assert gaussian(norm="bound").limits.curvature == pytest.approx(0.81)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [1.0, "per-sample"])
@pytest.mark.parametrize("size", [1e2, 1e8, 1e25])
def test_derivatives_are_finite_far_from_the_input(
    dtype: torch.dtype, gamma: str | float, size: float
) -> None:
    """β underflows there."""
    torch.manual_seed(0)
    W = torch.eye(4)
    energy = GaussianKernel(torch.eye(4), W, gamma=gamma, patch=None).to(dtype)
    x = torch.randn(2, 4, dtype=dtype).requires_grad_()
    context = context_of(energy, x)
    y = (torch.randn(2, 4, dtype=dtype) * size).requires_grad_()
    assert energy.value(y, context).isfinite().all()
    image = energy.descent(y, context)
    assert isinstance(image, Tensor)
    assert image.isfinite().all()
    first = torch.autograd.grad(image.sum(), (x, y), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), (x, y), allow_unused=True)
    for gradient in (*first, *second):
        assert gradient is None or gradient.isfinite().all()


# Rules for γ.


def test_running_scale_is_updated_by_training_batches_only() -> None:
    scale = RunningScale().double()
    first = torch.tensor([[1.0, 3.0], [5.0, 7.0]], dtype=torch.float64)
    assert scale.at_start(first).item() == pytest.approx(0.2 / 4)
    assert scale.at_start(3 * first).item() == pytest.approx(0.2 / 4)  # used, then updated
    assert scale.patch_energy.item() == pytest.approx(4 + 0.1 * (12 - 4))
    with torch.no_grad():
        assert scale.at_start(9 * first).item() == pytest.approx(0.2 / 4.8)
    scale.eval()
    assert scale.at_start(7 * first).item() == pytest.approx(0.2 / 4.8)
    assert scale.patch_energy.item() == pytest.approx(4.8)
    other = RunningScale().double().eval()
    other.load_state_dict(scale.state_dict())
    assert other.at_start(first) == scale.at_start(first)
    assert copy.deepcopy(scale).at_start(first) == scale.at_start(first)


def test_first_batch_initializes_the_running_scale_in_evaluation() -> None:
    scale = RunningScale().double().eval()
    energies = torch.tensor([[2.0]], dtype=torch.float64)
    assert scale.at_start(energies).item() == pytest.approx(0.1)
    assert scale.at_start(50 * energies).item() == pytest.approx(0.1)


@pytest.mark.parametrize("training", [True, False])
def test_running_scale_ignores_non_finite_samples(training: bool) -> None:
    scale = RunningScale().double().train(training)
    for unusable in (torch.full((2, 3), math.nan), torch.full((2, 3), math.inf), torch.zeros(2, 3)):
        assert scale.at_start(unusable.double()).isfinite()
        assert scale.patch_energy == 0
    scale.at_start(torch.zeros(0, 3, dtype=torch.float64))
    assert scale.patch_energy == 0
    energies = torch.tensor([[4.0, 4.0], [math.nan, 1.0], [math.inf, 1.0]], dtype=torch.float64)
    assert scale.at_start(energies).item() == pytest.approx(0.05)
    assert scale.patch_energy.item() == pytest.approx(4)


def test_recomputed_forward_passes_get_the_same_gamma_and_count_once() -> None:
    """Activation checkpointing runs the forward pass twice."""
    scale = RunningScale().double()
    first, second = torch.ones(1, 2, dtype=torch.float64), 5 * torch.ones(1, 2, dtype=torch.float64)
    scale.at_start(first)
    gamma = scale.at_start(second)
    after = scale.patch_energy.clone()
    assert torch.equal(scale.at_start(second), gamma)
    assert torch.equal(scale.patch_energy, after)
    assert scale.at_start(first) != gamma


def test_per_sample_scale_has_an_upper_limit() -> None:
    energies = torch.tensor([[3.0, 2.0, 4.0], [1e-9, 2.0, 4.0]], dtype=torch.float64)
    gamma = PerSampleScale().at_start(energies)
    torch.testing.assert_close(gamma.flatten().tolist(), [0.2 / 2, 0.2 / 0.02])
    sparse = torch.tensor([[0.0, 0.0, 6.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(PerSampleScale().at_start(sparse).flatten().tolist(), [10.0, 0.2])


def test_per_sample_scale_is_part_of_the_graph() -> None:
    energy = gaussian(gamma="per-sample", hidden=20)
    y = torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def descent(x: Tensor) -> Tensor:
        image = energy.descent(y, context_of(energy, x))
        assert isinstance(image, Tensor)
        return image

    assert gradcheck(descent, (images(2).requires_grad_(),), fast_mode=True)


def test_step_scale_is_detached_and_ignores_non_finite_energies() -> None:
    scale = StepScale()
    energies = torch.tensor([[3.0, 2.0], [math.nan, 0.5]])
    gamma = scale.at_state(torch.tensor(1.0), energies.requires_grad_())
    assert gamma.item() == pytest.approx(0.4)
    assert not gamma.requires_grad
    assert scale.at_start(torch.zeros(0, 3)).isfinite()
    assert scale.at_start(torch.zeros(1, 3)).isfinite()


def test_gamma_options() -> None:
    assert isinstance(kernel_scale(3), FixedScale)
    for scale in (FixedScale(1.0), RunningScale(0.5)):
        assert kernel_scale(scale) is scale
    choices = "a number, running, per-sample, paper"
    with pytest.raises(ValueError, match=f"gamma must be one of {choices}, got 'runing'"):
        kernel_scale("runing")
    for invalid in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="gamma must be positive"):
            kernel_scale(invalid)
    with pytest.raises(ValueError, match="momentum"):
        RunningScale(0.0)


def test_gaussian_options() -> None:
    U, W = eq.Conv2d(2, 4, 3), eq.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"has 8 numbers, but W_h takes 9; use Dense\(8, hidden\)"):
        GaussianKernel(U, W, eq.Dense(9, 3), channel_split=2)
    with pytest.raises(ValueError, match="at least 1"):
        GaussianKernel(U, W, patch=0)
    with pytest.raises(TypeError, match="must be a Dense"):
        GaussianKernel(U, W, torch.zeros(1, 1, 1, 1))
    energy = GaussianKernel(eq.Dense(2, 4), eq.Dense(3, 4))
    with pytest.raises(ValueError, match="use patch=None to treat the state as one patch"):
        context_of(energy, torch.randn(1, 2))


# Proposition 1.


def test_gaussian_kernel_is_an_inner_product_of_infinitely_many_features() -> None:
    """e^{−γ‖u−w‖²} = λ⟨Φ(u), Φ(w)⟩ with Φ⁽ⁱ⁾ all products of i entries times √((2γ)ⁱ/i!).

    λ = e^{−γ‖u‖²−γ‖w‖²} (the paper omits the last square), and the kernel is −2γE.
    """
    gamma = 0.2
    energy = dense(n=2, m=3, gamma=gamma)
    context = context_of(energy, torch.randn(4, 3, dtype=torch.float64))
    y = 0.5 * state_for(energy, context)
    u, w = context["c"], energy.W(y)
    factor = torch.exp(-gamma * (u.square() + w.square()).sum(dim=1))
    kernel = -2 * gamma * energy.value(y, context)
    exponent = 2 * gamma * (u * w).sum(dim=1).abs()

    def features(v: Tensor, orders: int) -> Tensor:
        products, parts = torch.ones(len(v), 1, dtype=v.dtype), []
        for i in range(orders + 1):
            parts.append(math.sqrt((2 * gamma) ** i / math.factorial(i)) * products)
            products = (products[:, :, None] * v[:, None]).flatten(1)
        return torch.cat(parts, dim=1)

    for orders in range(9):
        inner = (features(u, orders) * features(w, orders)).sum(dim=1)
        order = orders + 1
        remainder = factor * exponent**order * exponent.exp() / math.factorial(order)
        assert ((factor * inner - kernel).abs() <= remainder + 1e-14).all()
    torch.testing.assert_close(factor * inner, kernel, rtol=0, atol=1e-6)


# The polynomial and the sigmoid kernel.

INNER: dict[str, Callable[[], eq.Energy]] = {
    **{
        f"polynomial-{d}-{form}": lambda d=d, form=form: PolynomialKernel(  # type: ignore[misc]
            eq.Conv2d(2, 3, 3), d, form=form
        )
        for d in (1, 2, 3, 4)
        for form in ("scaled", "printed")
    },
    "sigmoid-scaled": lambda: SigmoidKernel(eq.Conv2d(2, 3, 3)),
    "sigmoid-printed": lambda: SigmoidKernel(eq.Conv2d(2, 3, 3), form="printed"),
}


@pytest.mark.parametrize("name", list(INNER))
@pytest.mark.parametrize("size", [0.2, 30.0])
def test_descent_symmetry_independence_and_curvature_of_inner_product_kernels(
    name: str, size: float
) -> None:
    """The sizes make either argument of the maximum in n the larger one."""
    energy = INNER[name]().double()
    x = size * images()
    context = context_of(energy, x)
    y = state_for(energy, context)
    if "printed" in name:
        y = y / (size * 10)
    assert_descent(energy, y, context)
    H = hessian(energy, y, context)
    torch.testing.assert_close(H, H.T, rtol=1e-10, atol=1e-10)
    alone = context_of(energy, x[1:2])
    torch.testing.assert_close(energy.descent(y[1:2], alone)[0], energy.descent(y, context)[1])
    bound = energy.bounds(context, Packing.of(y).layout).curvature
    unbounded = name.startswith(("polynomial-3", "polynomial-4"))
    assert (bound is None) == unbounded
    if bound is not None:
        assert bound.shape == (len(x),)
        assert torch.linalg.matrix_norm(H, 2) <= bound[0] * (1 + 1e-9)
    limit = energy.limits.curvature
    assert (limit is None) == (unbounded or "printed" in name)
    if limit is not None:
        assert bound is not None
        assert (bound <= limit * (1 + 1e-12)).all()
        assert limit <= 0.1


def test_curvature_bounds_are_attained() -> None:
    """At tanh² = 1/3 for the sigmoid; for both if ‖c‖² is so large that n = ‖c‖²/ρ."""
    x = 50 * images(1)
    for energy in (PolynomialKernel(eq.Conv2d(2, 3, 3), 2), SigmoidKernel(eq.Conv2d(2, 3, 3))):
        energy.double()
        context = context_of(energy, x)
        c, n = context["c"], context["n"]
        y = math.atanh(math.sqrt(1 / 3)) * c * n / c.square().sum()
        H = hessian(energy, y, context)
        limit = energy.limits.curvature
        assert limit is not None
        assert torch.linalg.matrix_norm(H, 2).item() == pytest.approx(limit, rel=1e-9)


def test_a_polynomial_of_degree_one_is_the_input_term() -> None:
    U = eq.Conv2d(2, 3, 3).double()
    x, y = images(), torch.randn(3, 3, 4, 4, dtype=torch.float64)
    for form in ("scaled", "printed"):
        energy = PolynomialKernel(U, 1, False, form=form)  # type: ignore[arg-type]
        expected = eq.Input(U, False).descent(y, eq.Input(U, False).inject(x))
        torch.testing.assert_close(energy.descent(y, context_of(energy, x)), expected)


def test_the_polynomial_of_the_paper_stays_at_zero_or_diverges() -> None:
    U = eq.Conv2d(2, 3, 3).double()
    W = eq.Conv2d(3, 4, 3, norm="bound", zeta=0.9).double()
    x = images()
    printed = PolynomialKernel(U, 2, form="printed") + eq.Quadratic(W.T)
    with torch.no_grad():
        unchecked = eq.EquilibriumLayer(printed, solver={"name": "auto", "check_minimum": False})
        assert unchecked(x).abs().max() == 0
        assert (unchecked.last_solution.status == eq.Status.STATIONARY).all()
        with pytest.warns(eq.ConvergenceWarning, match="diverged"):
            assert eq.EquilibriumLayer(printed)(x).isnan().all()  # unbounded below
        cell = eq.EquilibriumLayer(printed).cell
        context = cell.inject(x)
        y = 10 * context.parts["polynomial_kernel"]["c"].relu()
        for _ in range(5):
            image = cell.step(y, context)
            assert isinstance(image, Tensor)
            assert image.norm() > 10 * y.norm()
            y = image
        scaled = eq.EquilibriumLayer(PolynomialKernel(U, 2) + eq.Quadratic(W.T))
        solution = scaled.solve(x)
    assert solution.converged.all()
    assert isinstance(solution.state, Tensor)
    assert solution.state.norm() > 1


def test_inner_product_kernels_take_an_empty_batch() -> None:
    energy = PolynomialKernel(eq.Conv2d(2, 3, 3)) + eq.Quadratic(eq.Conv2d(3, 4, 3).T)
    layer = eq.EquilibriumLayer(energy)
    assert layer(torch.randn(0, 2, 4, 4)).shape == (0, 3, 4, 4)
    bound = layer.contraction_bound(torch.randn(0, 2, 4, 4))
    assert bound is not None


def test_inner_product_options() -> None:
    U = eq.Conv2d(2, 3, 3)
    for degree in (0, 1.5):
        with pytest.raises(ValueError, match="degree must be a positive integer"):
            PolynomialKernel(U, degree)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rho must be positive"):
        SigmoidKernel(U, rho=0.0)
    with pytest.raises(ValueError, match="form must be"):
        SigmoidKernel(U, form="paper")  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", [PolynomialKernel, SigmoidKernel])
def test_kernels_in_coupled_branches(kernel: Callable[..., eq.Energy]) -> None:
    """MOptEqs (Polynomial) and MOptEqs (Sigmoid) of GEQ Table 5."""
    torch.manual_seed(0)
    W = [eq.Conv2d(4, 5, 3, norm="bound", zeta=0.9) for _ in range(2)]
    U = [eq.Conv2d(2, 5, 3), eq.Conv2d(2, 5, 3) @ eq.AveragePool(2)]
    coupling = HeritageDiversity(W, diversity=0.01, scales=(1, 2))
    energy = (Branches([kernel(u) for u in U]) + coupling).double()
    layer = eq.EquilibriumLayer(
        eq.EnergyCell(energy), solver=eq.Anderson(tolerance=1e-10, max_iterations=300)
    )
    x = images()
    solution = layer.solve(x)
    assert solution.converged.all()
    with torch.no_grad():
        assert (layer.objective(x).residual(solution.state) < 1e-8).all()
    assert all(y.norm() > 1 for y in solution.state)


# The whole layer.

LAYERS: dict[str, Callable[[], eq.Energy]] = {
    "gaussian-running": lambda: gaussian(gamma="running", hidden=20, norm="bound"),
    "gaussian-per-sample": lambda: gaussian(gamma="per-sample", hidden=20, norm="bound"),
    "gaussian-narrow": lambda: gaussian(gamma=0.3, hidden=2, norm="bound"),
    "gaussian-whole": lambda: gaussian(gamma="per-sample", patch=None, norm="bound"),
    "polynomial": lambda: (
        PolynomialKernel(eq.Conv2d(2, 3, 1))
        + eq.Quadratic(eq.Conv2d(3, 4, 3, norm="bound", zeta=0.9).T)
    ),
    "sigmoid": lambda: (
        SigmoidKernel(eq.Conv2d(2, 3, 1))
        + eq.Quadratic(eq.Conv2d(3, 4, 3, norm="bound", zeta=0.9).T)
    ),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_derivatives_of_the_layer(name: str) -> None:
    """First and second derivatives of the equilibrium in the input and all parameters."""
    torch.manual_seed(0)
    layer = eq.EquilibriumLayer(
        LAYERS[name]().double(),
        activation="softplus",
        solver=eq.Anderson(tolerance=1e-13, max_iterations=500),
        gradient=eq.Implicit(tolerance=1e-13),
    ).eval()
    x = images(2, 2, 3)
    with torch.no_grad():
        layer(x)  # initializes the running statistic
    names = [n for n, _ in layer.named_parameters()]
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def output(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, named, (x,)).tanh()

    arguments = (x.requires_grad_(), *parameters)
    assert gradcheck(output, arguments, fast_mode=True)
    assert gradgradcheck(output, arguments, fast_mode=True)
