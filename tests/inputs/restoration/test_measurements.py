"""Measurements and corruptions: exact transposes, and damage that is what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equilibria.inputs.restoration import (
    Blur,
    Corruption,
    Deblurring,
    Denoising,
    Downsampling,
    Everything,
    Inpainting,
    LinearMeasurement,
    Mask,
    Measured,
    SuperResolution,
    get_corruption,
    list_corruptions,
    picture_of,
    picture_psnr,
    register_corruption,
    transpose,
)
from tests.inputs.restoration.small_generator import chance

KINDS = ("everything", "mask", "blur", "downsampling")


def measurement(kind: str, shape: tuple[int, ...], draw: torch.Generator) -> LinearMeasurement:
    if kind == "mask":
        known = torch.rand(shape[0], 1, *shape[2:], generator=draw) < 0.6
        return Mask(known.double())
    return {"everything": Everything(), "blur": Blur(0.9), "downsampling": Downsampling(2)}[kind]


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    samples=st.integers(1, 3),
    channels=st.integers(1, 3),
    height=st.integers(2, 6),
    width=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_the_adjoint_is_the_transpose(
    kind: str, samples: int, channels: int, height: int, width: int, seed: int
) -> None:
    shape, draw = (samples, channels, 2 * height, 2 * width), chance(seed)
    A = measurement(kind, shape, draw)
    x = torch.randn(shape, generator=draw).double()
    seen = A(x)
    y = torch.randn(seen.shape, generator=draw).double()
    pulled = A.adjoint(y)
    assert pulled.shape == x.shape
    left, right = (seen * y).flatten(1).sum(dim=1), (x * pulled).flatten(1).sum(dim=1)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pulled, transpose(A, y, x.shape), rtol=1e-10, atol=1e-12)
    assert A.picture(seen).shape == x.shape


def test_the_transpose_of_any_linear_map_is_differentiable() -> None:
    turned = transpose(lambda x: x.transpose(2, 3)[:, :, :2], torch.ones(1, 1, 2, 3), (1, 1, 3, 4))
    assert turned.shape == (1, 1, 3, 4)
    y = torch.randn(1, 1, 2, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: transpose(Downsampling(2), v, (1, 1, 4, 4)), (y,))


def test_a_blur_keeps_the_mean_of_what_is_flat_and_spreads_a_point() -> None:
    flat = torch.full((1, 2, 16, 16), 0.7).double()
    torch.testing.assert_close(Blur(1.5)(flat), flat)
    point = torch.zeros(1, 1, 31, 31).double()
    point[..., 15, 15] = 1
    spread = Blur(2.0)(point)
    steps = (torch.arange(31) - 15).double()
    variance = float((spread[0, 0].sum(dim=0) * steps.square()).sum())
    assert float(spread.sum()) == pytest.approx(1)
    assert variance == pytest.approx(4, rel=0.1)  # the kernel ends at three deviations
    assert float((spread - spread.mT).abs().max()) < 1e-12


def test_windows_have_the_size_asked_for_and_a_place_of_their_own() -> None:
    images = torch.ones(200, 3, 64, 64)
    seen = Inpainting().corrupt(images, chance())
    assert isinstance(seen.measurement, Mask)
    hidden = seen.measurement.known == 0
    assert hidden.shape == (200, 1, 64, 64)
    assert hidden.flatten(1).sum(dim=1).unique().tolist() == [20 * 20]  # the paper's window
    rows = hidden[:, 0].any(dim=2)
    assert rows.sum(dim=1).unique().tolist() == [20]
    first = rows.int().argmax(dim=1)
    assert len(first.unique()) > 30
    assert int(first.min()) == 0
    assert int(first.max()) == 44
    assert torch.equal(seen.measured == 0, hidden.expand(-1, 3, -1, -1))
    assert Inpainting(window=5).pixels(28) == 5
    assert Inpainting().pixels(28) == 9


def test_noise_has_the_deviation_asked_for_and_spares_what_is_hidden() -> None:
    images = torch.full((50, 1, 32, 32), 0.5)
    seen = Denoising(noise=0.3).corrupt(images, chance())
    assert float((seen.measured - images).std()) == pytest.approx(0.3, rel=0.02)
    assert seen.noise == 0.3
    masked = Inpainting(noise=0.3).corrupt(images, chance())
    assert isinstance(masked.measurement, Mask)
    assert not masked.measured[masked.measurement.known == 0].any()
    assert float((masked.measured - images)[masked.measurement.known == 1].std()) > 0.28


@pytest.mark.parametrize("name", ["denoise", "inpaint", "deblur", "superres"])
def test_damage_is_drawn_from_the_generator(name: str) -> None:
    images = torch.rand(4, 1, 16, 16)
    corruption = get_corruption(name, noise=0.1)
    one, again, other = (corruption.corrupt(images, chance(seed)).measured for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    own = corruption.corrupt(images).measured
    torch.manual_seed(3)
    assert torch.equal(own, corruption.corrupt(images).measured)
    picture = picture_of(corruption.corrupt(images).measurement, one, (16, 16))
    assert picture is not None
    assert picture.shape == images.shape


def test_any_callable_measures() -> None:
    images = torch.rand(2, 1, 6, 6)
    seen = Measured(lambda x: x.mean(dim=(2, 3)) ** 2).corrupt(images)
    torch.testing.assert_close(seen.measured, images.mean(dim=(2, 3)) ** 2)
    assert picture_of(seen.measurement, seen.measured, (6, 6)) is None


def test_corruptions_have_names() -> None:
    assert list_corruptions() == ["deblur", "denoise", "inpaint", "superres"]
    assert get_corruption("superres", factor=4) == SuperResolution(4)
    with pytest.raises(ValueError, match="did you mean 'denoise'"):
        get_corruption("denoice")
    with pytest.raises(TypeError, match="corruption 'denoise'"):
        get_corruption("denoise", window=3)
    with pytest.raises(ValueError, match="exists already"):
        register_corruption("denoise", Denoising)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Denoising(noise=0), "denoising needs noise"),
        (lambda: Denoising(noise=-1), "standard deviation"),
        (lambda: Inpainting(window=0), "window must be positive"),
        (lambda: Inpainting(window=9).corrupt(torch.zeros(1, 1, 8, 8)), "hides 9 of 8"),
        (lambda: Deblurring(width=0), "must be positive"),
        (lambda: Blur(3)(torch.zeros(1, 1, 8, 8)), "more than 9 pixels"),
        (lambda: SuperResolution(factor=1), "at least 2"),
        (lambda: Downsampling(3)(torch.zeros(1, 1, 8, 8)), "do not divide"),
        (lambda: picture_psnr(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3)), "one shape"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_psnr_is_that_of_what_is_seen() -> None:
    originals = torch.zeros(2, 1, 4, 4)
    images: Tensor = torch.stack([originals[0] + 0.1, originals[1] - 5])
    assert picture_psnr(images, originals).tolist() == pytest.approx([20, 120])


def test_a_mask_fills_in_only_what_is_hidden() -> None:
    known = torch.ones(1, 1, 2, 2)
    known[..., 0, 0] = 0
    filled = Mask(known).fill(torch.full((1, 1, 2, 2), 0.25), torch.ones(1, 1, 2, 2))
    assert filled.flatten().tolist() == [1, 0.25, 0.25, 0.25]


def test_corruptions_meet_the_protocol() -> None:
    kinds: list[Corruption] = [Denoising(), Inpainting(), Deblurring(), SuperResolution()]
    assert [kind.noise for kind in kinds] == [0.2, 0, 0.02, 0]
