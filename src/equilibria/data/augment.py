"""Random changes of training images that leave their labels true.

Images are batches of shape `(samples, channels, height, width)`, floating-point, on any device,
with values in [0, 1]. Chance comes from the generator alone, and is drawn where the generator
lives: a generator on the processor gives the same augmentation on every device.

For segmentation there are those that change images together with their label maps, of shape
`(samples, height, width)`: what moves a pixel moves its label along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.data.randaugment import RandAugment
from equilibria.registry import Registry

T = TypeVar("T")

Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""From images and a source of chance to images of the same shape."""

PairedAugmentation: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""From images, label maps and a source of chance to images and label maps."""


@dataclass(frozen=True)
class RandomCrop:
    """Pads each image by `padding` on every side and cuts its size out of that at random.

    mode: what is padded with, "zero" or the image reflected at its edge.
    """

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must not be negative, not {self.padding}")
        if self.mode not in ("zero", "reflect"):
            raise ValueError(f"mode must be 'zero' or 'reflect', not {self.mode!r}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        samples, _, height, width = images.shape
        reach = self.padding
        if self.mode == "reflect" and reach >= min(height, width):
            raise ValueError(
                f"images of {height}×{width} cannot be reflected {reach} pixels far: "
                "take a smaller padding, or mode='zero'"
            )
        padded = F.pad(
            images,
            (reach, reach, reach, reach),
            mode="constant" if self.mode == "zero" else "reflect",
        )
        corner = torch.randint(
            0, 2 * reach + 1, (2, samples), generator=generator, device=generator.device
        ).to(images.device)
        # Every window is a view of the padded images: indexing copies only those that were drawn.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(samples, device=images.device), :, corner[0], corner[1]]


@dataclass(frozen=True)
class RandomShift:
    """Moves each image by up to `pixels` in each direction, with black moving in."""

    pixels: int = 1

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return RandomCrop(self.pixels)(images, generator)


@dataclass(frozen=True)
class RandomFlip:
    """Mirrors an image, left to right, with this probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must be in [0, 1], not {self.probability}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return torch.where(self.draw(images, generator), images.flip(3), images)

    def draw(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Which images to mirror, shape `(samples, 1, 1, 1)`."""
        chance = torch.rand(len(images), generator=generator, device=generator.device)
        return (chance < self.probability).to(images.device)[:, None, None, None]


@dataclass(frozen=True)
class Cutout:
    """Blackens a square of side `size` around a random pixel; it may reach over the edge.

    DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout".
    """

    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, not {self.size}")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        samples, _, height, width = images.shape
        hidden = []
        for length in (height, width):
            center = torch.randint(
                0, length, (samples, 1), generator=generator, device=generator.device
            ).to(images.device)
            start = center - self.size // 2
            place = torch.arange(length, device=images.device)
            hidden.append((place >= start) & (place < start + self.size))
        square = hidden[0][:, None, :, None] & hidden[1][:, None, None, :]
        return images.masked_fill(square, 0)


@dataclass(frozen=True)
class GaussianNoise:
    """Adds normal noise of this standard deviation."""

    deviation: float

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(
            images.shape, generator=generator, dtype=images.dtype, device=generator.device
        )
        return images + self.deviation * noise.to(images.device)


@dataclass(frozen=True)
class Chain:
    """One augmentation after the other."""

    steps: tuple[Augmentation, ...]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for step in self.steps:
            images = step(images, generator)
        return images


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
        _check_pair(images, labels)
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
        _check_pair(images, labels)
        flipped = RandomFlip(self.probability).draw(images, generator)
        return (
            torch.where(flipped, images.flip(3), images),
            torch.where(flipped[:, 0], labels.flip(2), labels),
        )


@dataclass(frozen=True)
class PairedNoise:
    """Normal noise of this standard deviation on the images: it moves no pixel, the labels stay."""

    deviation: float

    def __call__(
        self, images: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return GaussianNoise(self.deviation)(images, generator), labels


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


def _check_pair(images: Tensor, labels: Tensor) -> None:
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


_alone: Registry[Augmentation] = Registry("augmentation")
_alone.register("crop", RandomCrop)
_alone.register("cutout", Cutout)
_alone.register("flip", RandomFlip)
_alone.register("noise", GaussianNoise)
_alone.register("randaugment", RandAugment)
_alone.register("shift", RandomShift)

_paired: Registry[PairedAugmentation] = Registry("augmentation for segmentation")
_paired.register("flip", RandomPairFlip)
_paired.register("noise", PairedNoise)
_paired.register("scale_crop", RandomScaleCrop)


def build_augmentation(step: str | Mapping[str, Any]) -> Augmentation:
    """An augmentation by its name, or by its name with options: `{"crop": {"padding": 4}}`."""
    return _build(_alone, step)


def build_paired_augmentation(step: str | Mapping[str, Any]) -> PairedAugmentation:
    """One for images with label maps, named alike: `{"scale_crop": {"size": [64, 64]}}`."""
    return _build(_paired, step)


def _build(registry: Registry[T], step: str | Mapping[str, Any]) -> T:
    if isinstance(step, str):
        return registry.create(step)
    if len(step) != 1:
        raise ValueError(
            f"a step of augmentation is a name, or one name with options, not {dict(step)}"
        )
    ((name, options),) = step.items()
    return registry.create(name, **(options or {}))
