"""Augmentations of images with label maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.data.augment import (
    Augmentation,
    Chain,
    Cutout,
    GaussianNoise,
    RandAugment,
    RandomCrop,
    RandomFlip,
    RandomScaleCrop,
    RandomShift,
)

IGNORE = 255


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blocks(samples: int = 6, height: int = 24, width: int = 36) -> tuple[Tensor, Tensor]:
    """Return images and label maps of random blocks; a pixel is (label + 1)/10."""
    coarse = torch.randint(0, 9, (samples, 1, height // 6, width // 6)).float()
    labels = F.interpolate(coarse, scale_factor=6, mode="nearest")[:, 0].long()
    return ((labels + 1) / 10)[:, None].repeat(1, 3, 1, 1), labels


MOVING: list[Augmentation] = [
    RandomScaleCrop((20, 30), (1.0, 1.0)),
    RandomScaleCrop((40, 30), (1.0, 1.0)),
    RandomFlip(),
    Chain((RandomScaleCrop((30, 30), (1.0, 1.0)), RandomFlip())),
]


@pytest.mark.parametrize("augmentation", MOVING, ids=str)
def test_moved_pixels_keep_their_labels(
    augmentation: Augmentation,
) -> None:
    images, labels = augmentation(*blocks(), generator())
    expected = torch.where(labels == IGNORE, 0.0, (labels + 1) / 10)
    torch.testing.assert_close(images, expected[:, None].expand_as(images))
    assert (labels != IGNORE).any()


def test_scaled_images_and_maps_are_aligned_in_flat_areas() -> None:
    """Away from the edges of blocks, where interpolation mixes values, pixels match labels."""
    images, labels = RandomScaleCrop((40, 40), (0.7, 2.0))(*blocks(64), generator())
    decoded = (images[:, 0] * 10 - 1).round().long()
    windows = F.pad(labels.float()[:, None], (2, 2, 2, 2), value=-1)
    highest = F.max_pool2d(windows, 5, stride=1)[:, 0]
    lowest = -F.max_pool2d(-windows, 5, stride=1)[:, 0]
    inner = (highest == lowest) & (labels != IGNORE)
    assert int(inner.sum()) > 10_000
    assert torch.equal(decoded[inner], labels[inner])


@pytest.mark.parametrize("vertical", [False, True])
def test_scaled_images_and_maps_are_aligned_within_half_a_pixel(vertical: bool) -> None:
    """If pixels are coordinates, a label is the pixel whose area contains the coordinate."""
    ramp = torch.arange(36).expand(50, 24, 36)
    images, labels = ((ramp + 0.5) / 36)[:, None].double(), ramp
    if vertical:
        images, labels = images.mT, labels.mT
    images, labels = RandomScaleCrop((30, 30), (0.5, 2.0))(images, labels, generator())
    coordinate = images[:, 0] * 36
    inside = labels != IGNORE
    distance = (coordinate - labels - 0.5)[inside].abs()
    assert float(distance.max()) < 0.5 + 1e-4
    assert float(distance.max()) > 0.4


@pytest.mark.parametrize("scale", [0.5, 0.8, 1.0, 1.3, 2.0])
def test_scaling_is_bilinear_for_images_and_nearest_for_labels(scale: float) -> None:
    images, labels = torch.rand(5, 2, 14, 21, dtype=torch.float64), torch.randint(0, 9, (5, 14, 21))
    size = (round(14 * scale), round(21 * scale))
    scaled, moved = RandomScaleCrop(size, (scale, scale))(images, labels, generator())
    torch.testing.assert_close(
        scaled,
        F.interpolate(images, size, mode="bilinear", align_corners=False),
        atol=1e-6,  # the weights are in float32
        rtol=0,
    )
    nearest = F.interpolate(labels[:, None].double(), size, mode="nearest-exact")[:, 0].long()
    assert torch.equal(moved, nearest)


def test_crops_have_all_offsets_and_small_images_are_padded() -> None:
    images, labels = blocks(1, 6, 6)
    numbered = torch.arange(36).reshape(1, 6, 6).repeat(300, 1, 1)
    _, cropped = RandomScaleCrop((4, 5), (1.0, 1.0))(
        images.repeat(300, 1, 1, 1), numbered, generator()
    )
    assert set(cropped[:, 0, 0].tolist()) == {
        row * 6 + column for row in range(3) for column in (0, 1)
    }
    padded_images, padded = RandomScaleCrop((8, 6), (1.0, 1.0), fill=0.5)(
        images.repeat(300, 1, 1, 1), labels.repeat(300, 1, 1), generator()
    )
    outside = padded == IGNORE
    assert set(outside.all(dim=2).int().argmin(dim=1).tolist()) == {0, 1, 2}
    assert torch.equal(outside.sum(dim=(1, 2)), torch.full((300,), 12))
    assert bool((padded_images[:, 0][outside] == 0.5).all())


def test_each_image_has_a_random_scale_within_the_limits() -> None:
    images, labels = torch.rand(200, 1, 20, 20), torch.zeros(200, 20, 20, dtype=torch.long)
    _, cropped = RandomScaleCrop((40, 40), (0.5, 2.0))(images, labels, generator())
    heights = (cropped != IGNORE).any(dim=2).sum(dim=1)
    assert 10 <= int(heights.min()) < 14
    assert 36 < int(heights.max()) <= 40


@pytest.mark.parametrize("augmentation", [*MOVING, RandomScaleCrop((20, 20))], ids=str)
def test_results_depend_only_on_the_seed(augmentation: Augmentation, device: torch.device) -> None:
    images, labels = (tensor.to(device) for tensor in blocks())
    first = augmentation(images, labels, generator(1))
    again = augmentation(images, labels, generator(1))
    other = augmentation(images, labels, generator(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
    assert first[0].device == first[1].device == images.device


def test_noise_keeps_label_maps() -> None:
    images, labels = blocks()
    changed, kept = GaussianNoise(0.1)(images, labels, generator())
    assert kept is labels
    assert not torch.equal(changed, images)


@pytest.mark.parametrize(
    "augmentation", [RandomCrop(2), RandomShift(1), Cutout(3), RandAugment()], ids=str
)
def test_augmentations_without_support_for_label_maps_raise(augmentation: Augmentation) -> None:
    with pytest.raises(ValueError, match="use scale_crop, flip or noise for segmentation"):
        augmentation(*blocks(), generator())


def test_dtypes_are_kept_and_empty_batches_work() -> None:
    images, labels = blocks()
    changed, moved = RandomScaleCrop((20, 20))(images.double(), labels.to(torch.uint8), generator())
    assert (changed.dtype, moved.dtype) == (torch.float64, torch.uint8)
    changed, moved = RandomScaleCrop((20, 20))(images[:0], labels[:0], generator())
    assert (changed.shape, moved.shape) == ((0, 3, 20, 20), (0, 20, 20))


def test_invalid_options_and_label_maps_raise() -> None:
    images, labels = blocks()
    with pytest.raises(ValueError, match="size must be positive"):
        RandomScaleCrop((0, 4))
    with pytest.raises(ValueError, match="ascending order"):
        RandomScaleCrop((4, 4), (2.0, 1.0))
    with pytest.raises(ValueError, match="probability"):
        RandomFlip(2.0)
    with pytest.raises(ValueError, match="label maps shape"):
        RandomFlip()(images, labels[:, :-1], generator())
    with pytest.raises(ValueError, match="cannot represent"):
        RandomScaleCrop((4, 4), ignore_index=-1)(images, labels.to(torch.uint8), generator())
