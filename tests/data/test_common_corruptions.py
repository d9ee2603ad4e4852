"""The nineteen common corruptions of images."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from equilibria.data import Split, load_dataset
from equilibria.data.common_corruptions import STRENGTHS, CorruptedImages, _plasma, corrupt, smooth
from equilibria.data.sets.arrays import CORRUPTIONS, EXTRA_CORRUPTIONS

NOISES = ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise")
KEEP_CONSTANTS = (
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)


def image(channels: int = 3, side: int = 32) -> Tensor:
    """Return a smooth image with an edge, which every corruption changes."""
    drawn = torch.rand((1, channels, side, side), generator=Generator().manual_seed(1))
    x = smooth(drawn, 1.5)[0]
    x = (x - x.min()) / (x.max() - x.min())
    x[:, side // 2 :] *= 0.4
    return x


def corrupted(name: str, severity: int, x: Tensor, seed: int = 0) -> Tensor:
    return corrupt(x, name, severity, Generator().manual_seed(seed))


def test_names_match_the_published_files() -> None:
    assert set(STRENGTHS) == {*CORRUPTIONS, *EXTRA_CORRUPTIONS}
    assert len(STRENGTHS) == 19
    assert all(len(strengths) == 5 for _, strengths in STRENGTHS.values())


@pytest.mark.parametrize("name", STRENGTHS)
@pytest.mark.parametrize(("channels", "size"), [(3, (32, 32)), (1, (8, 8)), (3, (20, 33))])
def test_shape_dtype_range_and_levels_are_kept(
    name: str, channels: int, size: tuple[int, int]
) -> None:
    x = image(channels, 40)[:, : size[0], : size[1]]
    for severity in range(1, 6):
        y = corrupted(name, severity, x)
        assert y.shape == x.shape
        assert y.dtype == torch.float32
        assert 0 <= float(y.min()) <= float(y.max()) <= 1
        assert torch.equal((y * 255).round() / 255, y)


@pytest.mark.parametrize("name", STRENGTHS)
def test_severity_5_changes_more_than_severity_1(name: str) -> None:
    def change(severity: int) -> float:
        pairs = [corrupted(name, severity, x, seed) for seed in range(8)]
        return float(torch.stack([(y - x).square().mean() for y in pairs]).mean())

    x = image()
    weakest, strongest = change(1), change(5)
    assert weakest > 0
    if name not in (
        "elastic_transform",
        "saturate",
        "spatter",
    ):  # Their parameters are not monotone.
        assert strongest > weakest


@pytest.mark.parametrize("name", KEEP_CONSTANTS)
def test_blurs_and_compression_keep_a_constant_image(name: str) -> None:
    even = torch.full((3, 32, 32), 128 / 255)
    for severity in (1, 3, 5):
        assert (corrupted(name, severity, even) - even).abs().max() <= 1.01 / 255


@pytest.mark.parametrize("name", STRENGTHS)
def test_random_numbers_come_from_the_generator(name: str) -> None:
    x = image()
    assert torch.equal(corrupted(name, 3, x, 5), corrupted(name, 3, x, 5))
    draws = name in (*NOISES, "glass_blur", "motion_blur", "elastic_transform") or name in (
        *("snow", "frost", "fog", "spatter"),
    )
    assert torch.equal(corrupted(name, 3, x, 5), corrupted(name, 3, x, 6)) != draws


def test_noise_has_the_published_standard_deviation() -> None:
    gray = torch.full((1, 200, 200), 0.5)
    for severity, deviation in enumerate((0.04, 0.06, 0.08, 0.09, 0.10), start=1):
        drawn = corrupted("gaussian_noise", severity, gray) - gray
        assert float(drawn.std()) == pytest.approx(deviation, rel=0.02)
    shot = corrupted("shot_noise", 5, gray) - gray
    assert float(shot.var()) == pytest.approx(0.5 / 50, rel=0.05)
    speckle = corrupted("speckle_noise", 5, gray) - gray
    assert float(speckle.std()) == pytest.approx(0.1, rel=0.02)
    hit = corrupted("impulse_noise", 5, gray)
    assert float(((hit == 0) | (hit == 1)).double().mean()) == pytest.approx(0.07, abs=0.006)


def test_contrast_brightness_and_saturation_match_their_formulas() -> None:
    x = image()
    mean = x.mean(dim=(1, 2), keepdim=True)
    step = 1.01 / 255
    assert (corrupted("contrast", 5, x) - (mean + 0.15 * (x - mean))).abs().max() <= step
    brighter = corrupted("brightness", 5, x)
    raised = (x.amax(0) + 0.3).clamp_max(1)
    assert (brighter.amax(0) - raised).abs().max() <= step
    hue = (x / x.amax(0)).nan_to_num(1)
    assert (brighter - hue * raised).abs().max() <= step
    duller = corrupted("saturate", 1, x)
    assert (duller - (x.amax(0) - 0.3 * (x.amax(0) - x))).abs().max() <= step
    black = torch.zeros(3, 4, 4)
    assert (corrupted("brightness", 5, black) - 0.3).abs().max() <= step


def test_gaussian_blur_has_unit_sum_and_the_given_variance() -> None:
    spot = torch.zeros(1, 1, 33, 33)
    spot[..., 16, 16] = 1
    blurred = smooth(spot, 1.5)[0, 0]
    places = torch.arange(33.0) - 16
    assert float(blurred.sum()) == pytest.approx(1)
    assert float((blurred.sum(0) * places**2).sum()) == pytest.approx(1.5**2, rel=0.02)


def test_fractals_have_range_0_to_1_and_are_rougher_with_slow_decay() -> None:
    like = torch.zeros(1, 1, 32, 32)
    smoother, rougher = (_plasma(like, Generator().manual_seed(0), d)[0, 0] for d in (3.0, 1.2))
    for plasma in (smoother, rougher):
        assert float(plasma.min()) == 0
        assert float(plasma.max()) == 1
    assert rougher.diff(dim=1).abs().mean() > 2 * smoother.diff(dim=1).abs().mean()


def test_corruption_of_an_image_depends_only_on_its_index() -> None:
    images = torch.stack([image(1, 8) for _ in range(6)])
    split = Split(images, torch.arange(6))
    noisy = CorruptedImages.of(split, "gaussian_noise:4")
    some, labels = noisy.fetch(torch.tensor([4, 1]))
    alone, _ = noisy.fetch(torch.tensor([1]))
    assert torch.equal(some[1], alone[0])
    assert labels.tolist() == [4, 1]
    assert not torch.equal(some[0], some[1])
    all_severities = CorruptedImages.of(split, "gaussian_noise")
    assert len(all_severities) == 30
    assert all_severities.labels is not None
    assert all_severities.labels.tolist() == 5 * list(range(6))
    assert torch.equal(all_severities.fetch(torch.tensor([3 * 6 + 1]))[0], alone)


def test_load_dataset_has_an_option_for_corruptions() -> None:
    clean, foggy = load_dataset("digits"), load_dataset("digits", corrupted="fog:3")
    assert "corrupted here: fog:3" in foggy.name
    assert len(foggy.test) == len(clean.test)
    first = torch.arange(2)
    assert torch.equal(foggy.train.fetch(first)[0], clean.train.fetch(first)[0])
    assert not torch.equal(foggy.test.fetch(first)[0], clean.test.fetch(first)[0])
    assert len(load_dataset("digits", corrupted="fog", test_samples=50).test) == 250
    for corruption, message in {
        "fogg": "no corruption 'fogg'; did you mean 'fog'",
        "fog:6": "severity must be an integer from 1 to 5, got 6",
        "fog:high": "name:severity as in fog:3",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_dataset("digits", corrupted=corruption)
