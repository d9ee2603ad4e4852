"""The ridge prior: its filters, its profile, its bounds, and the term of the data beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, unfold

import equilibria as eq
from equilibria.context import Context
from equilibria.context.state import Packing
from equilibria.energies import DataFidelity, RidgePrior, ridge
from equilibria.operators import AveragePool, Blur, Identity, Mask


def prior(**options: object) -> RidgePrior:
    torch.manual_seed(3)
    made = RidgePrior((6,), (3,), **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def prepared(term: eq.Energy, y: Tensor, *inputs: Tensor) -> Context:
    return term.complete(term.inject(*inputs), Packing.of(y).layout)


def hessian(term: eq.Energy, y: Tensor, context: Context) -> Tensor:
    def value(v: Tensor) -> Tensor:
        return term.value(v.view_as(y), context).sum()

    return torch.autograd.functional.hessian(value, y.flatten())


@pytest.mark.parametrize(
    ("channels", "sizes"), [((4,), (3,)), ((30,), (5,)), ((2, 3, 5), (2, 3, 2))]
)
def test_filters_have_zero_mean_and_norm_one_at_the_most(
    channels: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    made = RidgePrior(channels, sizes).double()
    W = made.filters()
    assert W.shape == (channels[-1], 1, made.size, made.size)
    torch.testing.assert_close(W.sum(dim=(2, 3)), torch.zeros_like(W[:, :, 0, 0]))
    columns = unfold(torch.eye(144).double().reshape(-1, 1, 12, 12), made.size)
    matrix = (W.flatten(1) @ columns).flatten(1)
    norm = torch.linalg.matrix_norm(matrix, 2)
    assert 0.8 < norm <= 1


def test_a_composition_is_one_convolution_after_the_other() -> None:
    torch.manual_seed(0)
    made = RidgePrior((2, 3), (3, 2)).double()
    made.kernels[1].data -= made.kernels[1].data.mean(dim=(2, 3), keepdim=True)
    y = torch.randn(1, 1, 8, 9).double()
    one_by_one = conv2d(conv2d(y, made.kernels[0]), made.kernels[1])
    ratio = one_by_one / conv2d(y, made.filters())
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))


@pytest.mark.parametrize("concavity", [0.0, 0.4, 0.9])
def test_the_curvature_stays_within_its_bounds(concavity: float) -> None:
    made = prior(concavity=concavity, steepness=3.0, noise=0.1)
    y = 0.3 * torch.randn(1, 1, 7, 7).double()
    context = prepared(made, y, y)
    eigenvalues = torch.linalg.eigvalsh(hessian(made, y, context))
    layout = Packing.of(y).layout
    assert -made.bounds(context, layout).concavity <= eigenvalues[0] + 1e-12
    assert eigenvalues[-1] <= made.bounds(context, layout).curvature + 1e-12
    assert made.bounds(context, layout).concavity <= concavity
    assert made.bounds(context, layout).curvature <= made.limits.curvature
    assert made.concavity == 0 or eigenvalues[0] < 0  # The weakly convex ones do bend downwards.


def test_the_profile_is_the_integral_of_its_slope() -> None:
    steps = prior().prepare(((1, 8, 8),))["steps"]
    assert isinstance(steps, Tensor)
    t = torch.linspace(-40, 40, 2001, dtype=torch.float64)
    t.requires_grad_()
    (slope,) = torch.autograd.grad(ridge._profile(t, steps, ridge.KNOTS).sum(), t)
    torch.testing.assert_close(ridge._slope_of(t.detach(), steps.tolist(), ridge.KNOTS), slope)
    far = ridge._slope_of(torch.tensor([30.0, 60.0]).double(), steps.tolist(), ridge.KNOTS)
    assert far[0] == far[1]


def test_a_brighter_picture_is_as_likely_and_larger_numbers_scale() -> None:
    """R(y + c) = R(y); R(ty; tσ) = t²R(y; σ) where what is learned is the same at all levels."""
    made = prior()
    y = 0.2 * torch.randn(2, 1, 9, 8).double()
    noise = torch.tensor([0.05, 0.1]).double()
    value = made.value(y, prepared(made, y, y, noise))
    torch.testing.assert_close(made.value(y + 0.4, prepared(made, y, y, noise)), value)
    made.log_scales.data[:] = made.log_scales.data[:, :1]
    value = made.value(y, prepared(made, y, y, noise))
    torch.testing.assert_close(made.value(3 * y, prepared(made, y, y, 3 * noise)), 9 * value)


def test_scales_are_those_of_the_levels_and_continuous_between_them() -> None:
    made = prior()
    levels = torch.tensor(ridge.LEVELS).double()
    image = torch.zeros(len(levels), 1, 9, 9).double()
    at = made.inject(image, levels)["scales"]
    learned = (ridge.PACE * made.log_scales.T).exp()
    torch.testing.assert_close(at, learned / levels[:, None], rtol=1e-6, atol=0)
    beside = made.inject(image, levels * (1 + 1e-7))["scales"]
    torch.testing.assert_close(at, beside, rtol=1e-5, atol=0)
    beyond = made.inject(image[:2], torch.tensor([1e-4, 5.0]).double())["scales"]
    expected = learned[[0, -1]] / torch.tensor([[1e-4], [5.0]]).double()
    torch.testing.assert_close(beyond, expected)


@pytest.mark.parametrize(("at_once", "across"), [(1, 128), (200, 4), (2**18, 3), (2**18, 128)])
def test_pieces_give_the_descent_of_the_whole(
    at_once: int, across: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ridge, "AT_ONCE", at_once)
    monkeypatch.setattr(ridge, "ACROSS", across)
    made = prior()
    y = torch.randn(2, 3, 11, 9).double()
    context = prepared(made, y, y, torch.tensor([0.2, 0.5]).double())
    whole = made.descent(y.clone().requires_grad_(), context)
    with torch.no_grad():
        torch.testing.assert_close(made.descent(y, context), whole)
    value = made.value(y.clone().requires_grad_(), context)
    with torch.no_grad():
        torch.testing.assert_close(made.value(y, context), value)


def test_bad_noise_and_small_pictures_are_explained() -> None:
    made = RidgePrior((6,), (3,))
    y = torch.zeros(1, 1, 9, 9)
    for noise in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="noise level must be positive"):
            made.inject(y, torch.tensor([noise]))
    with pytest.raises(ValueError, match="needs a noise level"):
        made.inject(y)
    with pytest.raises(ValueError, match="3×3 filters"):
        made.prepare(((1, 2, 9),))
    with pytest.raises(ValueError, match="as many kernel sizes"):
        RidgePrior((4, 8), (3,))
    with pytest.raises(ValueError, match="more than one pixel"):
        RidgePrior((4,), (1,))
    with pytest.raises(ValueError, match="knots must be positive and grow"):
        RidgePrior((4,), (3,), knots=(1.0, 0.5))


@pytest.mark.parametrize(
    "A", [Identity(), Mask(torch.ones(1, 1, 8, 8).tril()), Blur(0.8), AveragePool(2)], ids=str
)
def test_the_data_term_is_half_the_squared_misfit(A: eq.LinearOperator) -> None:
    A = A.double()
    y = torch.randn(2, 1, 8, 8).double()
    x = torch.randn_like(A(y))
    term = DataFidelity(A, noise=0.1)
    context = prepared(term, y, x, torch.tensor([0.1, 0.3]).double())
    misfit = (A(y) - x).square().flatten(1).sum(dim=1) / 2
    torch.testing.assert_close(term.value(y, context), misfit * torch.tensor([1.0, 9.0]).double())
    assert term.initial_state(context).shape == y.shape  # type: ignore[union-attr]
    one = prepared(term, y[:1], x[:1], torch.tensor([0.3]).double())
    eigenvalues = torch.linalg.eigvalsh(hessian(term, y[:1], one))
    layout = Packing.of(y).layout
    assert eigenvalues[-1] <= term.bounds(one, layout).curvature * (1 + 1e-9)  # type: ignore[operator]
    assert -term.bounds(one, layout).concavity <= eigenvalues[0] + 1e-9  # type: ignore[operator]


def test_a_box_forgives_what_rounding_did() -> None:
    y = torch.rand(3, 1, 6, 6).double()
    x = (y * 8).round() / 8
    term = DataFidelity(box=1 / 8)
    assert term.value(y, prepared(term, y, x)).max() < 1e-20
    assert DataFidelity().value(y, prepared(term, y, x)).min() > 1e-3
    outside = x + 1.0
    expected = 0.5 * (1 - 1 / 16) ** 2 * 36
    value = term.value(outside, prepared(term, y, x))
    torch.testing.assert_close(value, torch.full((3,), expected).double())
