"""Ridge prior (filters, profile, bounds) and data fidelity."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import unfold

import equilibria as eq
from equilibria.context import Context
from equilibria.context.state import Packing
from equilibria.energies import DataFidelity, RidgePrior, ridge
from equilibria.operators import AveragePool, Blur, Identity, Mask


def prior(**options: object) -> RidgePrior:
    torch.manual_seed(3)
    model = RidgePrior(6, 3, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def context_of(term: eq.Energy, y: Tensor, *inputs: Tensor) -> Context:
    return term.complete(term.inject(*inputs), Packing.of(y).layout)


def hessian(term: eq.Energy, y: Tensor, context: Context) -> Tensor:
    def value(v: Tensor) -> Tensor:
        return term.value(v.view_as(y), context).sum()

    return torch.autograd.functional.hessian(value, y.flatten())


@pytest.mark.parametrize(("channels", "size"), [(4, 3), (30, 5), (5, 2)])
def test_filters_have_zero_mean_and_norm_at_most_one(channels: int, size: int) -> None:
    torch.manual_seed(0)
    model = RidgePrior(channels, size).double()
    W = model.filters()
    assert W.shape == (channels, 1, size, size)
    torch.testing.assert_close(W.sum(dim=(2, 3)), torch.zeros_like(W[:, :, 0, 0]))
    columns = unfold(torch.eye(144).double().reshape(-1, 1, 12, 12), size)
    matrix = (W.flatten(1) @ columns).flatten(1)
    norm = torch.linalg.matrix_norm(matrix, 2)
    assert 0.8 < norm <= 1


@pytest.mark.parametrize("concavity", [0.0, 0.4, 0.9])
def test_curvature_is_within_its_bounds(concavity: float) -> None:
    model = prior(concavity=concavity, steepness=3.0, noise=0.1)
    y = 0.3 * torch.randn(1, 1, 7, 7).double()
    context = context_of(model, y, y)
    eigenvalues = torch.linalg.eigvalsh(hessian(model, y, context))
    layout = Packing.of(y).layout
    assert -model.bounds(context, layout).concavity <= eigenvalues[0] + 1e-12
    assert eigenvalues[-1] <= model.bounds(context, layout).curvature + 1e-12
    assert model.bounds(context, layout).concavity <= concavity
    assert model.bounds(context, layout).curvature <= model.limits.curvature
    # A weakly convex prior does have negative curvature.
    assert model.concavity == 0 or eigenvalues[0] < 0


@pytest.mark.parametrize("concavity", [0.0, 0.4])
def test_slope_rises_with_the_steepness_and_falls_with_the_concavity(concavity: float) -> None:
    """On an image as small as a filter, R is a sum of one profile per filter."""
    model = prior(concavity=concavity, steepness=3.0, noise=0.1)
    W = model.filters().detach()
    y = W[:1]
    responses = (W * y).sum(dim=(1, 2, 3))
    alphas = model.inject(y)["scales"][0].detach()
    steps = torch.linspace(0, 12, 400).double().div(alphas[0] * responses[0]).requires_grad_()
    value = model.value(steps[:, None, None, None] * y, context_of(model, y, y))
    (slope,) = torch.autograd.grad(value.sum(), steps)
    t = (alphas * responses)[:, None] * steps.detach()
    size = t.abs()
    falling = 3.0 - concavity * (size - 1)
    expected = t.sign() * torch.where(size <= 1, 3.0 * size, falling.clamp_min(0))
    torch.testing.assert_close(slope, (responses[:, None] * expected / alphas[:, None]).sum(dim=0))
    if concavity:
        assert size.max() > 1 + 3.0 / concavity  # beyond the last knot, where ψ′ = 0


def test_prior_ignores_brightness_and_scales_with_the_pixel_range() -> None:
    """R(y + c) = R(y), and R(ty; tσ) = t²R(y; σ) if learned scales are equal at all levels."""
    model = prior()
    y = 0.2 * torch.randn(2, 1, 9, 8).double()
    noise = torch.tensor([0.05, 0.1]).double()
    value = model.value(y, context_of(model, y, y, noise))
    torch.testing.assert_close(model.value(y + 0.4, context_of(model, y, y, noise)), value)
    model.log_scales.data[:] = model.log_scales.data[:, :1]
    value = model.value(y, context_of(model, y, y, noise))
    torch.testing.assert_close(model.value(3 * y, context_of(model, y, y, 3 * noise)), 9 * value)


def test_scales_interpolate_between_noise_levels_and_extrapolate_as_constants() -> None:
    model = prior()
    levels = torch.tensor(ridge.LEVELS).double()
    image = torch.zeros(len(levels), 1, 9, 9).double()
    at_levels = model.inject(image, levels)["scales"]
    learned = (ridge.RATE_FACTOR * model.log_scales.T).exp()
    torch.testing.assert_close(at_levels, learned / levels[:, None], rtol=1e-6, atol=0)
    nearby = model.inject(image, levels * (1 + 1e-7))["scales"]
    torch.testing.assert_close(at_levels, nearby, rtol=1e-5, atol=0)
    outside = model.inject(image[:2], torch.tensor([1e-4, 5.0]).double())["scales"]
    expected = learned[[0, -1]] / torch.tensor([[1e-4], [5.0]]).double()
    torch.testing.assert_close(outside, expected)


@pytest.mark.parametrize(("responses", "width"), [(1, 128), (200, 4), (2**18, 3), (2**18, 128)])
def test_value_and_descent_by_pieces_match_the_differentiable_ones(
    responses: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ridge, "RESPONSES_PER_PIECE", responses)
    monkeypatch.setattr(ridge, "MAX_PIECE_WIDTH", width)
    model = prior()
    y = torch.randn(2, 3, 11, 9).double()
    context = context_of(model, y, y, torch.tensor([0.2, 0.5]).double())
    whole = model.descent(y.clone().requires_grad_(), context)
    with torch.no_grad():
        torch.testing.assert_close(model.descent(y, context), whole)
    value = model.value(y.clone().requires_grad_(), context)
    with torch.no_grad():
        torch.testing.assert_close(model.value(y, context), value)


def test_invalid_arguments_raise() -> None:
    model = RidgePrior(6, 3)
    y = torch.zeros(1, 1, 9, 9)
    for noise in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="noise levels must be positive, got"):
            model.inject(y, torch.tensor([noise]))
    with pytest.raises(ValueError, match="needs a noise level"):
        model.inject(y)
    with pytest.raises(ValueError, match="3×3 filters"):
        model.prepare(((1, 2, 9),))
    with pytest.raises(ValueError, match="need more than one pixel, got kernel_size=1"):
        RidgePrior(4, 1)
    with pytest.raises(ValueError, match="channels must be at least 1"):
        RidgePrior(0, 3)


@pytest.mark.parametrize(
    "A", [Identity(), Mask(torch.ones(1, 1, 8, 8).tril()), Blur(0.8), AveragePool(2)], ids=str
)
def test_data_fidelity_is_half_the_weighted_squared_residual(A: eq.LinearOperator) -> None:
    A = A.double()
    y = torch.randn(2, 1, 8, 8).double()
    x = torch.randn_like(A(y))
    term = DataFidelity(A, noise=0.1)
    context = context_of(term, y, x, torch.tensor([0.1, 0.3]).double())
    residual = (A(y) - x).square().flatten(1).sum(dim=1) / 2
    torch.testing.assert_close(term.value(y, context), residual * torch.tensor([1.0, 9.0]).double())
    assert term.initial_state(context).shape == y.shape  # type: ignore[union-attr]
    single = context_of(term, y[:1], x[:1], torch.tensor([0.3]).double())
    eigenvalues = torch.linalg.eigvalsh(hessian(term, y[:1], single))
    layout = Packing.of(y).layout
    assert eigenvalues[-1] <= term.bounds(single, layout).curvature * (1 + 1e-9)  # type: ignore[operator]
    assert -term.bounds(single, layout).concavity <= eigenvalues[0] + 1e-9  # type: ignore[operator]


def test_data_fidelity_is_zero_within_the_quantization_box() -> None:
    y = torch.rand(3, 1, 6, 6).double()
    x = (y * 8).round() / 8
    term = DataFidelity(box=1 / 8)
    assert term.value(y, context_of(term, y, x)).max() < 1e-20
    assert DataFidelity().value(y, context_of(term, y, x)).min() > 1e-3
    outside = x + 1.0
    expected = 0.5 * (1 - 1 / 16) ** 2 * 36
    value = term.value(outside, context_of(term, y, x))
    torch.testing.assert_close(value, torch.full((3,), expected).double())
