"""Measurements of images: per-sample masks, blurs and lower resolutions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from equilibria.operators import AveragePool, Blur, LinearOperator, Mask

KINDS = ("mask", "blur", "pool")


def measurement(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> LinearOperator:
    if kind == "mask":
        known = torch.rand(shape[0], 1, *shape[2:], generator=generator) < 0.6
        return Mask(known.double())
    return Blur(0.9).double() if kind == "blur" else AveragePool(2).double()


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    samples=st.integers(1, 3),
    channels=st.integers(1, 3),
    height=st.integers(2, 6),
    width=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_the_adjoint_is_the_transpose_for_each_sample(
    kind: str, samples: int, channels: int, height: int, width: int, seed: int
) -> None:
    shape, generator = (
        (samples, channels, 2 * height, 2 * width),
        torch.Generator().manual_seed(seed),
    )
    A = measurement(kind, shape, generator)
    x = torch.randn(shape, generator=generator).double()
    measured = A(x)
    y = torch.randn(measured.shape, generator=generator).double()
    pulled = A.adjoint(y)
    assert pulled.shape == x.shape
    left, right = (measured * y).flatten(1).sum(dim=1), (x * pulled).flatten(1).sum(dim=1)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    _, expected = torch.autograd.functional.vjp(A, x, y)
    torch.testing.assert_close(pulled, expected, rtol=1e-10, atol=1e-12)


def test_a_blur_preserves_constant_images_and_spreads_a_point_by_its_width() -> None:
    flat = torch.full((1, 2, 16, 16), 0.7).double()
    torch.testing.assert_close(Blur(1.5)(flat), flat)
    point = torch.zeros(1, 1, 31, 31).double()
    point[..., 15, 15] = 1
    spread = Blur(2.0)(point)
    steps = (torch.arange(31) - 15).double()
    variance = float((spread[0, 0].sum(dim=0) * steps.square()).sum())
    assert float(spread.sum()) == pytest.approx(1)
    assert variance == pytest.approx(4, rel=0.1)  # the kernel is truncated at three deviations
    assert float((spread - spread.mT).abs().max()) < 1e-12


def test_a_blur_is_a_convolution_of_the_reflected_image() -> None:
    image = torch.randn(2, 3, 9, 7).double()
    steps = torch.arange(-3, 4).double()
    weights = torch.exp(-0.5 * steps.square())
    kernel = torch.outer(weights, weights) / weights.sum() ** 2
    padded = F.pad(image, (3, 3, 3, 3), mode="reflect")
    expected = F.conv2d(padded, kernel.expand(3, 1, 7, 7), groups=3)
    torch.testing.assert_close(Blur(1.0)(image), expected)


def test_the_picture_of_a_lower_resolution_consists_of_blocks() -> None:
    pool, measured = AveragePool(2), torch.rand(2, 1, 3, 3)
    picture = pool.picture(measured)
    assert picture.shape == (2, 1, 6, 6)
    torch.testing.assert_close(pool(picture), measured)


def test_fill_changes_only_hidden_pixels() -> None:
    known = torch.ones(1, 1, 2, 2)
    known[..., 0, 0] = 0
    filled = Mask(known).fill(torch.full((1, 1, 2, 2), 0.25), torch.ones(1, 1, 2, 2))
    assert filled.flatten().tolist() == [1, 0.25, 0.25, 0.25]


def test_the_norm_of_per_sample_masks_is_the_largest() -> None:
    known = torch.zeros(2, 1, 3, 3)
    known[1, ..., 0] = 1
    mask = Mask(known)
    assert float(mask.norm_bound((2, 3, 3))) == 1
    assert float(mask.norm_estimate((2, 3, 3))) == pytest.approx(1)


def test_a_width_of_zero_raises() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Blur(0)
