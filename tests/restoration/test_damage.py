"""Kinds of damage: their measurements, noise and names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from equilibria.operators import Blur, Mask
from equilibria.restoration import (
    Damage,
    Deblurring,
    Denoising,
    Inpainting,
    Measured,
    SuperResolution,
    get_damage,
    list_damages,
    register_damage,
)
from tests.inputs.small_generator import chance


def test_windows_have_the_requested_size_and_random_positions() -> None:
    images = torch.ones(200, 3, 64, 64)
    problem = Inpainting().corrupt(images, chance())
    assert isinstance(problem.measurement, Mask)
    hidden = problem.measurement.known == 0
    assert hidden.shape == (200, 1, 64, 64)
    assert hidden.flatten(1).sum(dim=1).unique().tolist() == [20 * 20]  # the paper's window
    rows = hidden[:, 0].any(dim=2)
    assert rows.sum(dim=1).unique().tolist() == [20]
    first = rows.int().argmax(dim=1)
    assert len(first.unique()) > 30
    assert int(first.min()) == 0
    assert int(first.max()) == 44
    assert torch.equal(problem.measured == 0, hidden.expand(-1, 3, -1, -1))
    assert Inpainting(window=5).pixels(28) == 5
    assert Inpainting().pixels(28) == 9


def test_noise_has_the_requested_deviation_and_only_affects_known_pixels() -> None:
    images = torch.full((50, 1, 32, 32), 0.5)
    problem = Denoising(noise=0.3).corrupt(images, chance())
    assert float((problem.measured - images).std()) == pytest.approx(0.3, rel=0.02)
    assert problem.noise == 0.3
    masked = Inpainting(noise=0.3).corrupt(images, chance())
    assert isinstance(masked.measurement, Mask)
    assert not masked.measured[masked.measurement.known == 0].any()
    assert float((masked.measured - images)[masked.measurement.known == 1].std()) > 0.28


@pytest.mark.parametrize("name", ["denoise", "inpaint", "deblur", "superres"])
def test_damage_depends_on_the_generator(name: str) -> None:
    images = torch.rand(4, 1, 16, 16)
    damage = get_damage(name, noise=0.1)
    first, repeated, other = (damage.corrupt(images, chance(seed)).measured for seed in (3, 3, 4))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    by_global_generator = damage.corrupt(images).measured
    torch.manual_seed(3)
    assert torch.equal(by_global_generator, damage.corrupt(images).measured)
    picture = replace(damage.corrupt(images), measured=first).picture((16, 16))
    assert picture is not None
    assert picture.shape == images.shape


def test_any_callable_is_a_measurement() -> None:
    images = torch.rand(2, 1, 6, 6)
    problem = Measured(lambda x: x.mean(dim=(2, 3)) ** 2).corrupt(images)
    torch.testing.assert_close(problem.measured, images.mean(dim=(2, 3)) ** 2)
    assert problem.picture((6, 6)) is None


def test_damages_have_names() -> None:
    assert list_damages() == [
        "deblur",
        "demosaic",
        "denoise",
        "inpaint",
        "poisson",
        "scatter",
        "superres",
    ]
    assert get_damage("superres", factor=4) == SuperResolution(4)
    with pytest.raises(ValueError, match="did you mean 'denoise'"):
        get_damage("denoice")
    with pytest.raises(TypeError, match="damage 'denoise'"):
        get_damage("denoise", window=3)
    with pytest.raises(ValueError, match="exists already"):
        register_damage("denoise", Denoising)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Denoising(noise=0), r"noise must be in \(0, 1\]"),
        (lambda: Denoising(noise=-1), r"noise must be in \(0, 1\]"),
        (lambda: Inpainting(noise=float("inf")), r"noise must be in \[0, 1\]"),
        (lambda: Inpainting(window=0), "window must be positive"),
        (
            lambda: Inpainting(window=9).corrupt(torch.zeros(1, 1, 8, 8)),
            "at most 7 of 8 pixels per side",
        ),
        (lambda: Deblurring(width=0), "must be positive"),
        (lambda: Blur(3)(torch.zeros(1, 1, 8, 8)), "more than 9 pixels"),
        (lambda: SuperResolution(factor=1), "at least 2"),
        (lambda: SuperResolution(3).corrupt(torch.zeros(1, 1, 8, 8)), "divisible by 3"),
    ],
)
def test_invalid_options_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_default_noise() -> None:
    kinds: list[Damage] = [Denoising(), Inpainting(), Deblurring(), SuperResolution()]
    assert [kind.noise for kind in kinds] == [0.2, 0, 0.02, 0]
