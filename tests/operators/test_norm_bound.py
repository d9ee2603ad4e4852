"""The rigorous norm bound: its tightness, and the search for the maximizing frequency."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria.operators import Conv1d, Conv2d, Dense, conv_symbol
from equilibria.operators.spectral import singular_value, top_singular
from tests.operators.bank import dense, true_norm

Convolution = Conv1d | Conv2d


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Convolution, tuple[int, ...]]:
    kind = draw(st.sampled_from([Conv1d, Conv2d]))
    stride = draw(st.integers(1, 3))
    channels_in, channels_out = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = tuple(stride * draw(st.integers(1, 4)) for _ in kind.axes)
    k = tuple(draw(st.integers(1, 5)) for _ in kind.axes)
    padding = draw(st.none() | st.integers(0, 3))
    torch.manual_seed(draw(st.integers(0, 100)))
    operator = kind(channels_in, channels_out, k, stride=stride, padding=padding).double()
    return operator, (channels_in, *sizes)


@settings(max_examples=100)
@given(convolutions())
def test_adjoint_and_bound_for_any_geometry(
    example: tuple[Convolution, tuple[int, ...]],
) -> None:
    operator, shape = example
    try:
        out = operator.output_shape(shape)
    except ValueError:
        return  # the kernel is larger than the padded map
    assert operator.input_shape(out) == shape
    x, y = torch.randn(2, *shape).double(), torch.randn(2, *out).double()
    left, right = (operator(x) * y).sum(), (x * operator.adjoint(y)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    true = true_norm(operator, shape)
    assert frequency_bound(operator, shape) >= true * (1 - 1e-12)
    assert float(operator.norm_bound(shape).detach()) >= true * (1 - 1e-12)


def frequency_bound(operator: Convolution, shape: tuple[int, ...]) -> float:
    """Return the bound by the symbol, on maps of any size."""
    kind = type(operator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_prefers_matrix", lambda *_: False)
        fresh = kind.from_tensor(operator.kernel, operator.stride, operator.padding)
        return float(fresh.norm_bound(shape).detach())


@pytest.mark.parametrize(("k", "n"), [(1, 4), (3, 4), (3, 6), (3, 9), (5, 8), (5, 9)])
def test_symbol_bound_is_tight_for_stride_one(k: int, n: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        operator = Conv2d(3, 4, k).double()
        assert frequency_bound(operator, (3, n, n)) <= 1.2 * true_norm(operator, (3, n, n))


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_bound_of_a_sequence_is_that_of_an_image_of_one_row(stride: int) -> None:
    """The symbol of a (1, k) kernel is that of a kernel of length k."""
    operator = Conv1d(3, 4, 5, stride=stride).double()
    size = 12 * stride
    spectrum = torch.fft.fft(operator.kernel.detach(), n=-(-(size + 2) // stride) * stride)
    coarse = spectrum.shape[2] // stride
    aliases = spectrum.reshape(4, 3, stride, coarse).permute(3, 0, 1, 2).flatten(2)
    expected = torch.linalg.matrix_norm(aliases, 2).max() / stride**0.5
    assert frequency_bound(operator, (3, size)) == pytest.approx(float(expected), rel=1e-12)
    if stride == 1:
        image = Conv2d.from_tensor(operator.kernel[:, :, None].detach())
        assert frequency_bound(image, (3, 1, size)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(("k", "n"), [(3, 12), (5, 20), (9, 40)])
def test_bound_of_a_sequence_is_tight(k: int, n: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        operator = Conv1d(3, 4, k).double()
        assert frequency_bound(operator, (3, n)) <= 1.1 * true_norm(operator, (3, n))


def test_strided_bound_is_that_of_the_aliases() -> None:
    """σ₁([K̂(ω₁) … K̂(ω_{s²})])/s over the aliases of each frequency, by the FFT."""
    operator, n, s = Conv2d(3, 4, 3, stride=2).double(), 12, 2
    size = -(-(n + 1) // s) * s
    spectrum = torch.fft.fft2(operator.kernel.detach(), s=(size, size))
    coarse = size // s
    aliases = spectrum.reshape(4, 3, s, coarse, s, coarse).permute(3, 5, 0, 1, 2, 4).flatten(3)
    expected = torch.linalg.matrix_norm(aliases, 2).max() / s
    assert frequency_bound(operator, (3, n, n)) == pytest.approx(float(expected), rel=1e-12)
    unstrided = Conv2d.from_tensor(operator.kernel)
    assert frequency_bound(operator, (3, n, n)) < 0.9 * frequency_bound(unstrided, (3, n, n))


@pytest.mark.parametrize(("k", "s"), [(1, 1), (1, 2), (2, 2), (3, 3), (2, 3)])
def test_kernels_that_do_not_overlap_are_bounded_exactly(k: int, s: int) -> None:
    operator = Conv2d(2, 5, k, stride=s, padding=0).double()
    shape = (2, 3 * s, 4 * s)
    assert frequency_bound(operator, shape) == pytest.approx(true_norm(operator, shape), rel=1e-12)


def test_small_maps_are_bounded_exactly() -> None:
    operator, shape = Conv2d(4, 6, 3).double(), (4, 2, 2)
    true = true_norm(operator, shape)
    assert float(operator.norm_bound(shape).detach()) == pytest.approx(true, rel=1e-12)
    assert frequency_bound(operator, shape) > 1.05 * true


def kernels() -> list[Tensor]:
    torch.manual_seed(0)
    delta = torch.zeros(4, 4, 3, 3)
    delta[..., 1, 1] = torch.eye(4)
    blur = torch.ones(3, 5, 5, 5)
    return [
        torch.randn(8, 8, 3, 3),
        torch.randn(3, 7, 3, 3),
        torch.randn(7, 3, 5, 5),
        torch.randn(6, 1, 3, 3) @ torch.randn(6, 1, 3, 3).mT,
        torch.randn(2, 2, 1, 4),
        delta,
        blur,
        torch.randn(1, 1, 3, 3),
        1e-3 * torch.randn(5, 5, 3, 3) + delta[:1, :1],
    ]


@pytest.mark.parametrize("index", range(len(kernels())))
@pytest.mark.parametrize("grid", [(12, 9), (33, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [64, 2**20])
def test_the_screened_search_agrees_with_the_full_search(
    index: int,
    grid: tuple[int, int],
    dtype: torch.dtype,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv_symbol, "CHUNK_ELEMENTS", chunk)
    kernel = kernels()[index].to(dtype)
    frequency = conv_symbol.maximizing_frequency(kernel, grid)
    symbols = [conv_symbol.symbol(kernel, w) for w in conv_symbol.frequencies(grid, kernel)]
    full = torch.linalg.matrix_norm(torch.stack(symbols), 2).max()
    reference = torch.fft.rfft2(kernel, s=grid).permute(2, 3, 0, 1)
    value = torch.linalg.svdvals(conv_symbol.symbol(kernel, frequency))[0]
    # Any of the frequencies that tie up to rounding is correct.
    tolerance = 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(value, full, rtol=tolerance, atol=0)
    largest = torch.linalg.matrix_norm(reference, 2).max()
    torch.testing.assert_close(value, largest, rtol=100 * tolerance, atol=0)


@pytest.mark.parametrize("index", range(len(kernels())))
@pytest.mark.parametrize("near", [(0.0, 0.0), (2.0, 1.0), (0.5, 3.0)])
def test_the_result_of_a_search_does_not_depend_on_its_start(
    index: int, near: tuple[float, float]
) -> None:
    """This includes ties, because a resumed run does not know the result of the last search."""
    kernel = kernels()[index].double()
    frequency = conv_symbol.maximizing_frequency(kernel, (12, 9), kernel.new_tensor(near))
    assert torch.equal(frequency, conv_symbol.maximizing_frequency(kernel, (12, 9)))


def test_a_search_from_the_last_result_computes_fewer_eigenvalues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = Conv2d(12, 12, 3, norm="bound", zeta=0.5)
    shape = (12, 16, 16)
    solved: list[int] = []
    eigvalsh = torch.linalg.eigvalsh

    def counting(matrices: Tensor) -> Tensor:
        solved.append(len(matrices))
        return eigvalsh(matrices)

    monkeypatch.setattr(torch.linalg, "eigvalsh", counting)
    operator.weights(shape)
    first = sum(solved)
    solved.clear()
    with torch.no_grad():
        operator.kernels[0].mul_(1.001)
    weight = operator.weights(shape)[0]
    assert sum(solved) < first
    fresh = Conv2d(12, 12, 3, norm="bound", zeta=0.5)
    fresh.load_state_dict(operator.state_dict())
    assert torch.equal(weight, fresh.weights(shape)[0])


def test_the_search_skips_most_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    eigvalsh = torch.linalg.eigvalsh

    def counting(matrices: Tensor) -> Tensor:
        solved.append(len(matrices))
        return eigvalsh(matrices)

    monkeypatch.setattr(torch.linalg, "eigvalsh", counting)
    conv_symbol.maximizing_frequency(torch.randn(24, 24, 3, 3), (34, 34))
    assert sum(solved) < 0.1 * len(conv_symbol.frequencies((34, 34), torch.zeros(0)))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_three_derivatives_of_the_singular_value_are_exact(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    def value(matrix: Tensor) -> Tensor:
        top = top_singular(matrix.detach())
        return singular_value(lambda v: matrix @ v, lambda u: matrix.mH @ u, top)

    def slope(matrix: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value(matrix), matrix, create_graph=True)
        return gradient.abs().square().sum()

    matrix = torch.randn(shape, dtype=dtype, requires_grad=True)
    torch.testing.assert_close(value(matrix), torch.linalg.svdvals(matrix)[0])
    assert torch.autograd.gradcheck(value, matrix)
    assert torch.autograd.gradgradcheck(value, matrix)

    def second_derivative(matrix: Tensor) -> Tensor:
        (second,) = torch.autograd.grad(slope(matrix) + value(matrix), matrix, create_graph=True)
        return second

    assert torch.autograd.gradcheck(second_derivative, matrix)


def test_the_second_derivative_is_finite_with_zero_channels() -> None:
    """With `svdvals` the result would be NaN, because two singular values are zero."""
    matrix = torch.randn(5, 4, dtype=torch.float64)
    matrix[:, 2:] = 0
    kernel = torch.nn.Parameter(matrix)
    operator = Dense.from_tensor(kernel, norm="bound", zeta=0.1)
    (first,) = torch.autograd.grad(operator.weight.pow(3).sum(), kernel, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), kernel)
    assert second.isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e12, 1e30])
def test_bound_of_very_small_and_large_kernels(magnitude: float) -> None:
    for operator, shape in ((Dense(4, 5), (4,)), (Conv2d(3, 4, 3), (3, 12, 12))):
        plain = operator.norm_bound(shape).detach()
        operator.kernel.data.mul_(magnitude)
        scaled = operator.norm_bound(shape)
        torch.testing.assert_close(scaled.detach(), plain * magnitude, rtol=1e-5, atol=0)
        (gradient,) = torch.autograd.grad(scaled, operator.kernel)
        assert gradient.isfinite().all()


def test_product_and_pool_bounds() -> None:
    from equilibria.operators import AveragePool

    conv2d = Conv2d(2, 3, 3).double()
    product = AveragePool(2) @ conv2d
    bound = product.norm_bound((2, 8, 8))
    torch.testing.assert_close(bound, conv2d.norm_bound((2, 8, 8)) / 2)
    assert true_norm(AveragePool(3).double(), (1, 6, 6)) == pytest.approx(1 / 3, rel=1e-12)
    assert dense(AveragePool(1), (1, 2, 2)).equal(torch.eye(4))


@pytest.mark.parametrize(("channels", "k", "n"), [(3, 5, 4), (16, 5, 5), (16, 5, 7), (40, 5, 5)])
def test_the_bound_of_wide_kernels_on_small_maps_is_tight(channels: int, k: int, n: int) -> None:
    """The bound by the symbol would be up to 1.65 times the norm, so the matrix is used."""
    operator = Conv2d(channels, channels, k).double()
    bound = float(operator.norm_bound((channels, n, n)).detach())
    true = true_norm(operator, (channels, n, n))
    assert true * (1 - 1e-9) <= bound <= 1.2 * true
