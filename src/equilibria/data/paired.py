"""Random changes of images together with their label maps, for segmentation.

Images have shape `(samples, channels, height, width)`, label maps `(samples, height, width)`; what
moves a pixel moves its label along. Chance comes from the generator alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.data.augment import Augmentation, GaussianNoise, RandomFlip, build_step
from equilibria.registry import Registry

PairedAugmentation: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""From images, label maps and a source of chance to images and label maps."""


@dataclass(frozen=True)
class RandomScaleCrop:
    """Scales each image by a random factor and cuts `size` (height, width) out of it at random.

    Factors are uniform between the two of `scales`. Images are interpolated bilinearly (with no
    smoothing before they shrink), labels take the nearest pixel's. Where the scaled image is
    smaller than `size`, it lies at a random place in it; around it the image is `fill` and the
    label `ignore_index`. With scales=(1, 1) it is a random crop.
    """

    size: tuple[int, int]
    scales: tuple[float, float] = (0.5, 2.0)
    ignore_index: int = 255
    fill: float = 0.0

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size must be positive, not {self.size}")
        if not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales must be positive, the smaller one first, not {self.scales}")

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        check_pair(images, labels)
        range_of_labels = torch.iinfo(labels.dtype)
        if not range_of_labels.min <= self.ignore_index <= range_of_labels.max:
            raise ValueError(
                f"labels of {labels.dtype} cannot hold the ignore_index {self.ignore_index}: "
                "convert them, e.g. labels.long()"
            )
        low, high = self.scales
        chance = torch.rand(
            3, len(images), generator=generator, dtype=torch.float64, device=generator.device
        )
        scale = low + (high - low) * chance[0]
        (height, width), device = images.shape[2:], images.device
        row_inside, row, y = _draw_axis(height, self.size[0], scale, chance[1], device)
        column_inside, column, x = _draw_axis(width, self.size[1], scale, chance[2], device)
        inside = row_inside[:, :, None] & column_inside[:, None, :]
        sample = torch.arange(len(images), device=device)[:, None, None]
        nearest = labels[sample, row[:, :, None], column[:, None, :]]
        scaled = _interpolate(images, y, x)
        return (
            torch.where(inside[:, None], scaled, self.fill),
            torch.where(inside, nearest, self.ignore_index),
        )


@dataclass(frozen=True)
class RandomPairFlip:
    """Mirrors an image and its label map, left to right, with this probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        RandomFlip(self.probability)

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        check_pair(images, labels)
        flipped = RandomFlip(self.probability).draw(images, generator)
        return (
            torch.where(flipped, images.flip(3), images),
            torch.where(flipped[:, 0], labels.flip(2), labels),
        )


@dataclass(frozen=True)
class ImagesOnly:
    """An augmentation that moves no pixel, such as noise or `Normalize`: the labels stay."""

    augmentation: Augmentation

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return self.augmentation(images, generator), labels


@dataclass(frozen=True)
class PairedChain:
    """One paired augmentation after the other."""

    steps: tuple[PairedAugmentation, ...]

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        for step in self.steps:
            images, labels = step(images, labels, generator)
        return images, labels


def _noise(deviation: float) -> PairedAugmentation:
    return ImagesOnly(GaussianNoise(deviation))


_augmentations: Registry[PairedAugmentation] = Registry("augmentation for segmentation")
_augmentations.register("flip", RandomPairFlip)
_augmentations.register("noise", _noise)
_augmentations.register("scale_crop", RandomScaleCrop)


def build_paired_augmentation(step: str | Mapping[str, Any]) -> PairedAugmentation:
    """One for images with label maps, named alike: `{"scale_crop": {"size": [64, 64]}}`."""
    return build_step(_augmentations, step)


def check_pair(images: Tensor, labels: Tensor) -> None:
    """A clear error where label maps do not belong to the images."""
    if images.dim() != 4 or labels.shape != (len(images), *images.shape[2:]):
        raise ValueError(
            "expected images (samples, channels, height, width) and label maps (samples, height, "
            f"width) of the same size, not {tuple(images.shape)} and {tuple(labels.shape)}"
        )


def _draw_axis(
    length: int, size: int, scale: Tensor, chance: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pixels of a crop come from, along one side; each of shape `(samples, size)`.

    Whether they are inside the image, the nearest pixel's index, and the center of each in the
    image, whose side goes from −1 to 1.
    """
    scaled = (length * scale).round().clamp_min(1)
    spare = scaled - size
    first = spare.clamp_max(0) + (chance * (spare.abs() + 1)).floor()
    place = first[:, None] + torch.arange(size, device=scale.device)
    center = (place + 0.5) * (length / scaled)[:, None]
    inside = (place >= 0) & (place < scaled[:, None])
    nearest = center.floor().clamp(0, length - 1).long()
    # Not every device has the float64 of the draw.
    return inside.to(device), nearest.to(device), (2 * center / length - 1).float().to(device)


def _interpolate(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear; a pixel at the border has nothing beyond it to be mixed with."""
    samples, height, width = len(images), rows.shape[1], columns.shape[1]
    down = rows[:, :, None].expand(samples, height, width)
    right = columns[:, None, :].expand(samples, height, width)
    grid = torch.stack((right, down), dim=3).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
