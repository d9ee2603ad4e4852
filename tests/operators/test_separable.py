"""Separable convolutions: agreement with Conv2d for the kernel P·D, norm bound, norm control."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equilibria.operators import Conv2d, SeparableConv2d, conv_symbol, separable, spectral
from tests.operators.bank import true_norm

Image = tuple[int, int, int]

GEOMETRIES: dict[str, tuple[int, Image]] = {
    "symbol": (1, (2, 12, 12)),
    "matrix": (1, (2, 3, 3)),
    "stride": (2, (2, 12, 14)),
}
"""Stride and input shape, for the bound by the symbol, by the matrix, and with aliases."""


@pytest.fixture(params=GEOMETRIES)
def geometry(request: pytest.FixtureRequest) -> tuple[int, Image]:
    return GEOMETRIES[request.param]


def random_kernels(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return depthwise and pointwise kernels of a map from 2 to 3 channels."""
    return torch.randn(2, 1, 3, 3, dtype=dtype), torch.randn(3, 2, 1, 1, dtype=dtype)


def build(
    kernels: tuple[Tensor, ...], stride: int, norm: str | None, zeta: float = 0.5
) -> SeparableConv2d:
    depthwise, pointwise = (nn.Parameter(kernel.detach().clone()) for kernel in kernels)
    channels, size = pointwise.shape[:2], (depthwise.shape[2], depthwise.shape[3])
    operator = SeparableConv2d(channels[1], channels[0], size, stride=stride, norm=norm, zeta=zeta)
    operator = operator.to(depthwise)
    operator.depthwise, operator.pointwise = depthwise, pointwise
    return operator


def full_kernel(operator: SeparableConv2d) -> Tensor:
    """Return the kernel of the equivalent convolution, shape (out, in, k, k)."""
    return (operator.pointwise * operator.depthwise.transpose(0, 1)).detach()


# Values


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [None, 0, (2, 1)])
def test_is_the_convolution_with_the_product_of_the_kernels(
    stride: int, padding: int | None
) -> None:
    operator = SeparableConv2d(4, 3, (3, 5), stride=stride, padding=padding).double()
    reference = Conv2d.from_tensor(full_kernel(operator), stride, padding)
    z = torch.randn(2, 4, 8, 6).double()
    y = operator(z)
    torch.testing.assert_close(y, reference(z))
    torch.testing.assert_close(operator.adjoint(y), reference.adjoint(y))
    assert operator.bias_shape == reference.bias_shape == (3, 1, 1)


def test_parameters() -> None:
    operator = SeparableConv2d(24, 40, 5)
    assert sum(p.numel() for p in operator.parameters()) == 24 * 5**2 + 24 * 40
    assert operator.depthwise.shape == (24, 1, 5, 5)
    assert operator.pointwise.shape == (40, 24, 1, 1)
    assert operator.weights() == (operator.pointwise, operator.depthwise)
    assert float(operator.depthwise.detach().std()) == pytest.approx(1 / 5, rel=0.1)
    assert float(operator.pointwise.detach().std()) == pytest.approx(24**-0.5, rel=0.1)
    assert repr(SeparableConv2d(2, 3, 3, stride=2, norm="bound")) == (
        "SeparableConv2d(2, 3, (3, 3), stride=2, padding=(1, 1), norm='bound', zeta=0.95)"
    )


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 0, 3), {}),
        ((0, 2, 3), {}),
        ((2, 2, 0), {}),
        ((2, 2, 3), {"stride": 0}),
        ((2, 2, 3), {"padding": -1}),
        ((2, 2, 3), {"norm": "bound", "zeta": 0.0}),
    ],
)
def test_invalid_sizes_raise(sizes: tuple[int, int, int], options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"positive|negative"):
        SeparableConv2d(*sizes, **options)  # type: ignore[arg-type]


def test_error_messages_are_those_of_a_convolution() -> None:
    with pytest.raises(ValueError, match=r"SeparableConv2d\(2, 3, .*divisible by the stride 2"):
        SeparableConv2d(2, 3, 3, stride=2)(torch.zeros(1, 2, 6, 5))
    with pytest.raises(ValueError, match="at least 5, 5"):
        SeparableConv2d(2, 3, 5, padding=0)(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"the shape of an output, got \(B, 2, 4, 4\)"):
        SeparableConv2d(2, 3, 3).adjoint(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="depends on the size of the input"):
        SeparableConv2d(2, 3, 3, norm="bound").weights()


@pytest.mark.parametrize("stride", [1, 2])
def test_channels_last_format_is_preserved(stride: int) -> None:
    operator = SeparableConv2d(4, 6, 3, stride=stride)
    z = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    y = operator(z)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert operator.adjoint(y).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, operator(z.contiguous()))
    torch.testing.assert_close(operator.adjoint(y), operator.adjoint(y.contiguous()))


# Norm bound


def frequency_bound(operator: SeparableConv2d | Conv2d, shape: Image) -> float:
    """Return the bound by the symbol, on maps of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(operator), "_prefers_matrix", lambda *_: False)
        fresh = copy.deepcopy(operator)
        fresh._memo = type(fresh._memo)()
        return float(fresh.norm_bound(shape).detach())


def product_of_norms(operator: SeparableConv2d, shape: Image) -> float:
    plane = (1, *shape[1:])
    filters = [
        Conv2d.from_tensor(kernel[None], operator.stride, operator.padding)
        for kernel in operator.depthwise.detach()
    ]
    matrix = torch.linalg.matrix_norm(operator.pointwise.detach().flatten(1), 2)
    return float(matrix) * max(frequency_bound(filter_, plane) for filter_ in filters)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[SeparableConv2d, Image]:
    stride = draw(st.integers(1, 3))
    channels = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    height, width = (stride * draw(st.integers(1, 4)) for _ in range(2))
    k = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    padding = draw(st.none() | st.integers(0, 3))
    torch.manual_seed(draw(st.integers(0, 100)))
    operator = SeparableConv2d(*channels, k, stride=stride, padding=padding).double()
    return operator, (channels[0], height, width)


@settings(max_examples=60)
@given(convolutions())
def test_adjoint_and_bound_for_any_geometry(example: tuple[SeparableConv2d, Image]) -> None:
    operator, shape = example
    try:
        out = operator.output_shape(shape)
    except ValueError:
        return  # the kernel is larger than the padded map
    x, y = torch.randn(2, *shape).double(), torch.randn(2, *out).double()
    left, right = (operator(x) * y).sum(), (x * operator.adjoint(y)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    true, bound = true_norm(operator, shape), frequency_bound(operator, shape)
    assert true * (1 - 1e-12) <= bound <= product_of_norms(operator, shape) * (1 + 1e-12)
    assert float(operator.norm_bound(shape).detach()) >= true * (1 - 1e-12)
    # The bound is that of Conv2d, including aliases, without its complex matrices.
    reference = Conv2d.from_tensor(full_kernel(operator), operator.stride, operator.padding)
    assert bound == pytest.approx(frequency_bound(reference, shape), rel=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [(8, 8), (6, 12), (12, 6)])
def test_the_bound_is_tighter_than_the_product_of_norms(
    channels: tuple[int, int], stride: int
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        operator = SeparableConv2d(*channels, 3, stride=stride).double()
        shape = (channels[0], 12, 12)
        true = true_norm(operator, shape)
        bound = float(operator.norm_bound(shape).detach())
        assert true * (1 - 1e-12) <= bound <= 1.06 * true
        assert product_of_norms(operator, shape) > 1.04 * bound


def test_small_maps_are_bounded_exactly() -> None:
    operator, shape = SeparableConv2d(4, 6, 3).double(), (4, 2, 2)
    true = true_norm(operator, shape)
    assert float(operator.norm_bound(shape).detach()) == pytest.approx(true, rel=1e-12)
    assert frequency_bound(operator, shape) > 1.05 * true


@pytest.mark.parametrize("channels", [(8, 5), (5, 8), (1, 4), (4, 1)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [64, 2**20])
def test_search_finds_the_largest_symbol(
    channels: tuple[int, int],
    stride: int,
    dtype: torch.dtype,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv_symbol, "CHUNK_ELEMENTS", chunk)
    operator = SeparableConv2d(*channels, 3, stride=stride).to(dtype)
    frequency = operator._maximizing_frequency(tuple(k.detach() for k in operator.kernels), (12, 9))
    stacked = conv_symbol.polyphase(full_kernel(operator), stride)
    largest = torch.linalg.matrix_norm(torch.fft.fft2(stacked, s=(12, 9)).permute(2, 3, 0, 1), 2)
    value = torch.linalg.matrix_norm(conv_symbol.symbol(stacked, frequency), 2)
    torch.testing.assert_close(value, largest.max(), rtol=1000 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e12, 1e30])
def test_bound_of_very_small_and_large_kernels(magnitude: float) -> None:
    operator, shape = SeparableConv2d(3, 4, 3), (3, 12, 12)
    plain = operator.norm_bound(shape).detach()
    operator.depthwise.data.mul_(magnitude)
    scaled = operator.norm_bound(shape)
    torch.testing.assert_close(scaled.detach(), plain * magnitude, rtol=1e-5, atol=0)
    operator.pointwise.data.div_(magnitude)
    torch.testing.assert_close(operator.norm_bound(shape).detach(), plain, rtol=1e-5, atol=0)
    gradients = torch.autograd.grad(scaled, list(operator.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


# Norm control


class _Result(nn.Module):
    def __init__(self, operator: SeparableConv2d, shape: Image, kind: str) -> None:
        super().__init__()
        self.operator, self.shape, self.kind = operator, shape, kind

    def forward(self) -> Tensor:
        if self.kind == "norm_bound":
            return self.operator.norm_bound(self.shape)
        pointwise, depthwise = self.operator.weights(self.shape)
        return pointwise * depthwise.transpose(0, 1)


def function(module: _Result) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the result as a function of two tensors, for derivative checks."""

    def result(depthwise: Tensor, pointwise: Tensor) -> Tensor:
        kernels = {"operator.depthwise": depthwise, "operator.pointwise": pointwise}
        return torch.func.functional_call(module, kernels)

    return result


@pytest.mark.parametrize("scale", [1.0, 0.01], ids=["above", "below"])
def test_derivatives_of_the_bounded_weights(geometry: tuple[int, Image], scale: float) -> None:
    stride, shape = geometry
    kernels = tuple((scale * kernel).requires_grad_() for kernel in random_kernels())
    weights = function(_Result(build(kernels, stride, "bound"), shape, "weights"))
    assert torch.autograd.gradcheck(weights, kernels)
    assert torch.autograd.gradgradcheck(lambda d, p: weights(d, p).pow(3).sum(), kernels)


def test_derivatives_of_the_norm_bound(geometry: tuple[int, Image]) -> None:
    stride, shape = geometry
    kernels = tuple(kernel.requires_grad_() for kernel in random_kernels())
    bound = function(_Result(build(kernels, stride, "bound", 100.0), shape, "norm_bound"))
    assert torch.autograd.gradcheck(bound, kernels)
    assert torch.autograd.gradgradcheck(bound, kernels)


def test_derivatives_are_finite_with_zero_channels() -> None:
    """|d̂(ω)| is not differentiable where d̂(ω) = 0, so P diag(|d̂|) would give NaN."""
    operator, shape = SeparableConv2d(4, 5, 3, norm="bound", zeta=0.1).double(), (4, 12, 12)
    operator.depthwise.data[:2] = 0
    pointwise, depthwise = operator.weights(shape)
    total = (pointwise.pow(3).sum() + 1) * (depthwise.pow(3).sum() + 1)
    parameters = list(operator.parameters())
    first = torch.autograd.grad(total, parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
    assert all(g.isfinite().all() for g in (*first, *second))


def test_estimated_gradient_is_exact_for_the_vector_in_use(geometry: tuple[int, Image]) -> None:
    stride, shape = geometry
    kernels = tuple(kernel.requires_grad_() for kernel in random_kernels())
    operator = build(kernels, stride, "estimate")
    operator.weights(shape)
    assert torch.autograd.gradcheck(function(_Result(operator.eval(), shape, "weights")), kernels)


def test_gradient_has_no_component_along_the_kernels(geometry: tuple[int, Image]) -> None:
    """W does not change if P or D is scaled."""
    stride, shape = geometry
    operator = build(random_kernels(), stride, "bound")
    kernel = _Result(operator, shape, "weights")()
    (kernel * torch.randn_like(kernel)).sum().backward()
    for parameter in operator.parameters():
        assert parameter.grad.norm() > 0.01
        assert abs(float((parameter.grad * parameter.detach()).sum())) < 1e-12


@pytest.mark.parametrize("zeta", [0.3, 0.95])
def test_norm_is_at_most_zeta(geometry: tuple[int, Image], zeta: float) -> None:
    stride, shape = geometry
    operator = build(tuple(5 * kernel for kernel in random_kernels()), stride, "bound", zeta)
    raw = full_kernel(operator)
    pointwise, depthwise = operator.weights(shape)
    assert depthwise is operator.depthwise
    ratio = pointwise * depthwise.transpose(0, 1) / raw
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))  # K · min(1, ζ/b)
    assert true_norm(operator, shape) <= zeta * (1 + 1e-12)
    assert float(operator.norm_bound(shape).detach()) == pytest.approx(zeta)
    operator = build((operator.depthwise, operator.pointwise), stride, "estimate", zeta)
    assert true_norm(operator, shape) <= 1.05 * zeta
    bound = float(operator.norm_bound(shape).detach())
    assert bound >= true_norm(operator, shape) * (1 - 1e-12)


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_kernels_below_zeta_are_not_changed(geometry: tuple[int, Image], norm: str) -> None:
    stride, shape = geometry
    operator = build(tuple(0.1 * kernel for kernel in random_kernels()), stride, norm)
    pointwise, depthwise = operator.weights(shape)
    assert pointwise is operator.pointwise
    assert depthwise is operator.depthwise


@pytest.mark.parametrize("norm", ["bound", "estimate"])
@pytest.mark.parametrize("zero", ["depthwise", "pointwise", "both", "product"])
def test_zero_kernels(geometry: tuple[int, Image], norm: str, zero: str) -> None:
    stride, shape = geometry
    depthwise, pointwise = random_kernels()
    if zero == "product":  # neither kernel is zero, but their product is
        depthwise[0], pointwise[:, 1] = 0, 0
    if zero in {"depthwise", "both"}:
        depthwise.zero_()
    if zero in {"pointwise", "both"}:
        pointwise.zero_()
    operator = build((depthwise, pointwise), stride, norm)
    total = sum((weight + 1).pow(3).sum() for weight in operator.weights(shape))
    total = total + operator.norm_bound(shape) + operator.norm_estimate(shape)
    parameters = [operator.depthwise, operator.pointwise]
    first = torch.autograd.grad(total, parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), parameters)
    assert float(operator.norm_bound(shape).detach()) == 0
    for parameter, slope, curvature in zip(parameters, first, second, strict=True):
        torch.testing.assert_close(slope, 3 * (parameter + 1).square())
        torch.testing.assert_close(curvature, 6 * (parameter + 1))


@pytest.mark.parametrize("norm", ["bound", "estimate"])
@pytest.mark.parametrize("name", ["depthwise", "pointwise"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_propagated_and_not_cached(
    geometry: tuple[int, Image], norm: str, name: str, bad: float
) -> None:
    stride, shape = geometry
    operator = build(random_kernels(), stride, norm)
    kernel = getattr(operator, name)
    good = kernel.detach().clone()
    kernel.data[0] = bad
    assert not all(weight.isfinite().all() for weight in operator.weights(shape))
    kernel.data.copy_(good)
    assert all(weight.isfinite().all() for weight in operator.weights(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_half_precision_kernels(geometry: tuple[int, Image], norm: str, dtype: torch.dtype) -> None:
    stride, shape = geometry
    kernels = tuple(kernel.to(dtype) for kernel in random_kernels())
    operator = build(kernels, stride, norm)
    weight = operator.weights(shape)[0]
    exact = build(tuple(kernel.float() for kernel in kernels), stride, norm).weights(shape)[0]
    assert weight.dtype == dtype
    torch.testing.assert_close(weight.float(), exact, rtol=0.02, atol=1e-3)
    weight.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in operator.parameters())


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_autocast_does_not_change_the_weight(geometry: tuple[int, Image], norm: str) -> None:
    stride, shape = geometry
    kernels = random_kernels(torch.float32)
    expected = build(kernels, stride, norm).weights(shape)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = build(kernels, stride, norm).weights(shape)[0]
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)


# Caches and the state_dict


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record of the searches for a frequency and of the eigendecompositions."""
    calls: list[str] = []
    for module, name in ((separable, "maximizing_frequency"), (spectral, "top_singular")):
        original = getattr(module, name)

        def recorded(*args: object, name: str = name, original: Callable = original) -> object:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(module, name, recorded)
    return calls


@pytest.mark.parametrize("trained", ["depthwise", "pointwise"])
def test_one_search_per_update_of_either_kernel(
    geometry: tuple[int, Image], searches: list[str], trained: str
) -> None:
    stride, shape = geometry
    operator = build(random_kernels(), stride, "bound")
    per_update = 1 if shape == (2, 3, 3) else 2
    for step in range(1, 4):
        for _ in range(3):
            operator.weights(shape)
            operator.norm_bound(shape)
            with torch.no_grad():
                operator.weights(shape)
        assert len(searches) == step * per_update
        getattr(operator, trained).data.mul_(1.1)  # does not change `_version`


def test_one_search_per_input_shape(searches: list[str]) -> None:
    operator = SeparableConv2d(3, 2, 3, norm="bound", zeta=0.1)
    weights = [operator.weights((3, n, n))[0] for n in (12, 16, 12, 16)]
    assert searches.count("maximizing_frequency") == 2
    torch.testing.assert_close(weights[0], weights[2], rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["depthwise", "pointwise"])
def test_one_kernel_may_be_frozen(geometry: tuple[int, Image], frozen: str) -> None:
    """The scale depends on both kernels: P is in the graph even if only D is trained."""
    stride, shape = geometry
    operator = build(random_kernels(), stride, "bound")
    both = torch.autograd.grad(operator.weights(shape)[0].sum(), list(operator.parameters()))
    getattr(operator, frozen).requires_grad_(False)
    operator.weights(shape)[0].sum().backward()
    for parameter, expected in zip(operator.parameters(), both, strict=True):
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected)
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_cached_weights_are_valid_after_copies_and_casts(
    geometry: tuple[int, Image], norm: str
) -> None:
    stride, shape = geometry
    operator = build(random_kernels(torch.float32), stride, norm)
    operator.weights(shape)[0].sum().backward()
    with torch.no_grad():
        weight = operator.weights(shape)[0]
        assert operator.weights(shape)[0] is weight
        assert not weight.requires_grad
        assert copy.deepcopy(operator).weights(shape)[0].equal(weight)
        double = copy.deepcopy(operator).double().eval()
        assert double.weights(shape)[0].dtype == torch.float64
        torch.testing.assert_close(double.weights(shape)[0].float(), weight)
        assert all(w.is_meta for w in copy.deepcopy(operator).to("meta").weights(shape))
        operator.depthwise.data.mul_(2)
        torch.testing.assert_close(operator.weights(shape)[0], weight / 2, rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp itself
@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_function_transforms(geometry: tuple[int, Image], norm: str) -> None:
    stride, shape = geometry
    operator = build(random_kernels(), stride, norm)
    operator.weights(shape)
    result = function(_Result(operator, shape, "weights"))
    kernels = tuple(k.detach().clone() for k in (operator.depthwise, operator.pointwise))

    def loss(depthwise: Tensor, pointwise: Tensor) -> Tensor:
        return result(depthwise, pointwise).pow(3).sum()

    gradients = torch.func.grad(loss, argnums=(0, 1))(*kernels)
    directions = tuple(torch.randn_like(kernel) for kernel in kernels)
    _, slope = torch.func.jvp(loss, kernels, directions)
    expected = torch.autograd.grad(
        loss(operator.depthwise, operator.pointwise), [operator.depthwise, operator.pointwise]
    )
    torch.testing.assert_close(gradients, expected)
    total = sum((g * d).sum() for g, d in zip(expected, directions, strict=True))
    torch.testing.assert_close(slope, total)
    copy.deepcopy(operator)


def estimating() -> tuple[SeparableConv2d, Image]:
    return SeparableConv2d(3, 4, 3, norm="estimate", zeta=0.3), (3, 6, 6)


def test_reloaded_model_gives_identical_outputs() -> None:
    assert set(SeparableConv2d(3, 4, 3, norm="bound").state_dict()) == {"depthwise", "pointwise"}
    operator, shape = estimating()
    for _ in range(3):
        operator.weights(shape)
        operator.depthwise.data.add_(0.05 * torch.randn_like(operator.depthwise))
    state = copy.deepcopy(operator.state_dict())
    assert set(state) == {"depthwise", "pointwise", "norm_vector"}
    fresh, _ = estimating()
    used, _ = estimating()
    used.weights((3, 4, 4))
    for other in (fresh, used):
        other.load_state_dict(state)
        assert other.eval().weights(shape)[0].equal(operator.eval().weights(shape)[0])
    operator.train()
    fresh.train()
    assert fresh.weights(shape)[0].equal(operator.weights(shape)[0])


def test_the_vector_is_refined_in_training_but_not_in_evaluation() -> None:
    operator, shape = estimating()
    operator.eval().weights(shape)
    assert operator.norm_vector.shape == (0,)
    operator.train().weights(shape)
    vector = operator.norm_vector.clone()
    operator.weights(shape)
    assert operator.norm_vector.equal(vector)
    for name in ("depthwise", "pointwise"):
        kernel = getattr(operator, name)
        kernel.data.add_(0.1 * torch.randn_like(kernel))
        operator.eval().weights(shape)
        assert operator.norm_vector.equal(vector)
        operator.train().weights(shape)
        assert not operator.norm_vector.equal(vector)
        vector = operator.norm_vector.clone()


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_norm_stays_near_zeta_in_a_training_run(norm: str) -> None:
    operator, shape = SeparableConv2d(3, 4, 3, norm=norm, zeta=0.5).double(), (3, 10, 10)
    z, target = torch.randn(4, *shape).double(), torch.randn(4, 4, 10, 10).double()
    optimizer = torch.optim.Adam(operator.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (operator(z) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        assert true_norm(operator, shape) <= 0.5 * (1 if norm == "bound" else 1.05)
    assert losses[-1] < losses[0]
