"""RandAugment: operations compared with Pillow, and their random choice."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from equilibria.data import randaugment
from equilibria.data.augment import RandAugment
from equilibria.data.randaugment import OPERATIONS

LEVEL = 1 / 255
WITHOUT_STRENGTH = {"autocontrast", "equalize"}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def augmented(augmentation: RandAugment, images: Tensor) -> Tensor:
    return augmentation(images, torch.zeros(len(images)), generator())[0]


def photographs(samples: int = 3, height: int = 31, width: int = 37) -> Tensor:
    """Return smooth images with some noise in a narrow range, rounded to 8 bits, in float64."""
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 4, width), indexing="ij")
    phase = torch.rand(samples, 3, 1, 1) * 6
    smooth = 0.45 + 0.25 * torch.sin(x + phase) * torch.cos(y - phase)
    noisy = smooth + 0.1 * torch.rand(samples, 3, height, width)
    return (noisy * 255).round().double() / 255


def to_pillow(image: Tensor) -> Image.Image:
    pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255


def same(value: float, samples: int = 3) -> Tensor:
    return torch.full((samples,), value, dtype=torch.float64)


def test_equalize_matches_pillow() -> None:
    images = photographs()
    images[2] = 0.2
    results = randaugment.equalize(images)
    for image, result in zip(images, results, strict=True):
        torch.testing.assert_close(result, from_pillow(ImageOps.equalize(to_pillow(image))))
    assert not torch.equal(results[0], images[0])


@pytest.mark.parametrize("bits", [4, 6, 7, 8])
def test_posterize_matches_pillow(bits: int) -> None:
    images = photographs()
    results = randaugment.posterize(images, same(bits))
    for image, result in zip(images, results, strict=True):
        torch.testing.assert_close(result, from_pillow(ImageOps.posterize(to_pillow(image), bits)))


@pytest.mark.parametrize("level", [0, 100, 130, 255])
def test_solarize_matches_pillow(level: int) -> None:
    """Pillow also inverts values equal to the threshold."""
    images = photographs()
    results = randaugment.solarize(images, same(level / 255))
    for image, result in zip(images, results, strict=True):
        torch.testing.assert_close(
            result, from_pillow(ImageOps.solarize(to_pillow(image), level + 1))
        )


def test_autocontrast_matches_pillow_up_to_rounding() -> None:
    images = photographs()
    images[2, 1] = 0.4
    results = randaugment.autocontrast(images)
    for image, result in zip(images, results, strict=True):
        reference = from_pillow(ImageOps.autocontrast(to_pillow(image)))
        torch.testing.assert_close(result, reference, atol=1.01 * LEVEL, rtol=0)
    assert float(results[0].amin()) == 0
    assert float(results[0].amax()) == 1


@pytest.mark.parametrize(
    ("name", "enhancer"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("color", ImageEnhance.Color),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
@pytest.mark.parametrize("factor", [0.0, 0.1, 0.73, 1.0, 1.27, 1.9])
def test_enhancements_match_pillow_up_to_rounding(
    name: str, enhancer: Callable[[Image.Image], ImageEnhance._Enhance], factor: float
) -> None:
    images = photographs()
    results = OPERATIONS[name](images, same((factor - 1) / 0.9))
    for image, result in zip(images, results, strict=True):
        reference = from_pillow(enhancer(to_pillow(image)).enhance(factor))
        # Pillow rounds both the base image and the result.
        tolerance = (0.5 * abs(factor - 1) + 1.01) * LEVEL
        torch.testing.assert_close(result, reference, atol=tolerance, rtol=0)


def moved_by_loops(image: Tensor, source: Callable[[float, float], tuple[float, float]]) -> Tensor:
    """Move an image pixel by pixel; `source` maps the center of a pixel to its source."""
    moved = torch.zeros_like(image)
    height, width = image.shape[1:]
    for row in range(height):
        for column in range(width):
            x, y = source(column + 0.5, row + 0.5)
            if 0 <= x < width and 0 <= y < height:
                moved[:, row, column] = image[:, math.floor(y), math.floor(x)]
    return moved


def rotation(degrees: float) -> Callable[[float, float], tuple[float, float]]:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

    def source(x: float, y: float) -> tuple[float, float]:
        right, down = x - 18.5, y - 15.5
        return 18.5 + cosine * right - sine * down, 15.5 + sine * right + cosine * down

    return source


MOVES = {
    "shear_x": lambda v: lambda x, y: (x + v * y, y),
    "shear_y": lambda v: lambda x, y: (x, y + v * x),
    "translate_x": lambda v: lambda x, y: (x + 37 * v, y),
    "translate_y": lambda v: lambda x, y: (x, y + 31 * v),
    "rotate": rotation,
}
MAX_VALUES = {
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 150 / 331,
    "translate_y": 150 / 331,
    "rotate": 30.0,
}


@pytest.mark.parametrize("name", MOVES)
def test_geometric_operations_match_their_formulas(name: str) -> None:
    images = photographs()
    strengths = torch.tensor([0.3043, -0.7923, 0.9977], dtype=torch.float64)
    values = MAX_VALUES[name] * strengths
    results = OPERATIONS[name](images, strengths)
    for image, result, value in zip(images, results, values.tolist(), strict=True):
        assert torch.equal(result, moved_by_loops(image, MOVES[name](value)))


@pytest.mark.parametrize("degrees", [-30.0, 12.3, 90.0])
def test_rotation_matches_pillow(degrees: float) -> None:
    images = photographs(height=32, width=32)
    results = randaugment.rotate(images, same(degrees))
    for image, result in zip(images, results, strict=True):
        reference = from_pillow(to_pillow(image).rotate(degrees))
        agree = ((result - reference).abs() < 1e-9).all(dim=0)
        # Pillow's fixed-point coordinates can be in a neighboring pixel.
        assert float(agree.double().mean()) > 0.995


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - WITHOUT_STRENGTH))
def test_operations_of_strength_zero_are_the_identity(name: str) -> None:
    images = torch.rand(4, 3, 9, 8)
    images[0] = 1
    assert torch.equal(OPERATIONS[name](images, torch.zeros(4)), images)


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"identity"}))
@pytest.mark.parametrize("strength", [-1.0, 0.3, 1.0])
def test_operations_change_images_and_keep_the_range(name: str, strength: float) -> None:
    images = photographs().float()
    changed = OPERATIONS[name](images, torch.full((3,), strength))
    assert float((changed - images).abs().amax()) > 0.01 or (name, strength) == ("posterize", 0.3)
    assert not torch.equal(changed, images)
    assert bool(((changed >= 0) & (changed <= 1)).all())


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_do_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    images = photographs()
    strengths = torch.tensor([-0.3, 0.3, 0.7], dtype=torch.float64)
    together = OPERATIONS[name](images, strengths)
    for index in range(3):
        alone = OPERATIONS[name](images[index : index + 1], strengths[index : index + 1])
        torch.testing.assert_close(alone[0], together[index])


def test_operations_are_drawn_uniformly_with_both_signs() -> None:
    assert len(OPERATIONS) == 14
    image = photographs(1).float()
    changed = augmented(RandAugment(1, magnitude=9), image.expand(2000, -1, -1, -1))
    variants = [(name, sign) for name in OPERATIONS for sign in (-1, 1)]
    expected = [OPERATIONS[name](image, torch.tensor([0.3 * sign])) for name, sign in variants]
    distance = torch.cdist(
        changed.flatten(1).double(),
        torch.cat(expected).flatten(1).double(),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    nearest, which = distance.min(dim=1)
    assert float(nearest.max()) < 1e-4
    counts_by_sign = torch.bincount(which, minlength=28).reshape(14, 2)
    assert bool(((counts_by_sign.sum(dim=1) > 95) & (counts_by_sign.sum(dim=1) < 195)).all())
    with_sign = {
        name for name, counts in zip(OPERATIONS, counts_by_sign, strict=True) if counts.all()
    }
    assert with_sign == set(MOVES) | {"brightness", "color", "contrast", "sharpness"}


def test_several_operations_are_applied_in_sequence() -> None:
    images = photographs(64).float()
    once, three_times = (augmented(RandAugment(operations=n), images) for n in (1, 3))
    changed_once, changed_three_times = (
        int(((changed - images).abs().amax(dim=(1, 2, 3)) > 0).sum())
        for changed in (once, three_times)
    )
    assert changed_three_times > changed_once
    assert torch.equal(augmented(RandAugment(operations=0), images), images)


def test_color_does_not_change_gray_images() -> None:
    images = torch.rand(6, 1, 8, 8)
    assert torch.equal(OPERATIONS["color"](images, torch.full((6,), -0.7)), images)
    assert augmented(RandAugment(), images).shape == images.shape


def test_invalid_options_raise() -> None:
    with pytest.raises(ValueError, match="operations"):
        RandAugment(operations=-1)
    with pytest.raises(ValueError, match=r"in \[0, 30\]"):
        RandAugment(magnitude=31)
    with pytest.raises(ValueError, match="gray or RGB"):
        augmented(RandAugment(), torch.rand(1, 2, 4, 4))
