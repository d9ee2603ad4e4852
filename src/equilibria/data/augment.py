"""Random changes of training images that leave their labels true.

Images are batches of shape `(samples, channels, height, width)`, floating-point, on any device,
with values in [0, 1]. The class of an image stays; in label maps, `(samples, height, width)`, what
moves a pixel moves its label along. Chance comes from the generator alone, and is drawn where the
generator lives: a generator on the processor gives the same augmentation on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.data.randaugment import OPERATIONS, STRONGEST
from equilibria.registry import Registry, check_values

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Images and their labels: one an image, or a map with one a pixel."""

Augmentation: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], Batch]
"""From images, labels and a source of chance to images and labels."""


def _has_maps(images: Tensor, labels: Tensor) -> bool:
    """Whether every pixel has its own label; an error where such maps do not fit the images."""
    if labels.dim() < 3:
        return False
    if images.dim() != 4 or labels.shape != (len(images), *images.shape[2:]):
        raise ValueError(
            "expected images (samples, channels, height, width) and label maps (samples, height, "
            f"width) of the same size, not {tuple(images.shape)} and {tuple(labels.shape)}"
        )
    return True


def _refuse_maps(augmentation: Augmentation, images: Tensor, labels: Tensor) -> None:
    if _has_maps(images, labels):
        raise ValueError(
            f"{augmentation} cannot change label maps along with their images: take scale_crop, "
            "flip or noise for segmentation"
        )


def _integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=generator, device=generator.device)


@dataclass(frozen=True)
class RandomCrop:
    """Pads each image by `padding` on every side and cuts its size out of that at random.

    mode: what is padded with, "zero" or the image reflected at its edge.
    """

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        check_values(self, not_negative=("padding",), one_of={"mode": ("zero", "reflect")})

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        _refuse_maps(self, images, labels)
        samples, _, height, width = images.shape
        reach = self.padding
        if self.mode == "reflect" and reach >= min(height, width):
            raise ValueError(
                f"images of {height}×{width} cannot be reflected {reach} pixels far: "
                "take a smaller padding, or mode='zero'"
            )
        mode = "constant" if self.mode == "zero" else "reflect"
        padded = F.pad(images, (reach, reach, reach, reach), mode=mode)
        corner = _integers(2 * reach + 1, (2, samples), generator).to(images.device)
        # Every window is a view of the padded images: indexing copies only those that were drawn.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        sample = torch.arange(samples, device=images.device)
        return windows[sample, :, corner[0], corner[1]], labels


@dataclass(frozen=True)
class RandomShift:
    """Moves each image by up to `pixels` in each direction, with black moving in.

    Examples:
        >>> shift = eq.data.RandomShift(pixels=1)
        >>> images, labels = shift(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), torch.Generator())
        >>> images.shape
        torch.Size([2, 1, 8, 8])
    """

    pixels: int = 1

    def __post_init__(self) -> None:
        check_values(self, not_negative=("pixels",))

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        return RandomCrop(self.pixels)(images, labels, generator)


@dataclass(frozen=True)
class RandomFlip:
    """Mirrors an image, left to right, with this probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_values(self, fraction=("probability",))

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        chance = torch.rand(len(images), generator=generator, device=generator.device)
        flipped = (chance < self.probability).to(images.device)[:, None, None, None]
        if _has_maps(images, labels):
            labels = torch.where(flipped[:, 0], labels.flip(2), labels)
        return torch.where(flipped, images.flip(3), images), labels


@dataclass(frozen=True)
class Cutout:
    """Blackens a square of side `size` around a random pixel; it may reach over the edge.

    DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout".
    """

    size: int = 16

    def __post_init__(self) -> None:
        check_values(self, not_negative=("size",))

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        _refuse_maps(self, images, labels)
        samples, _, height, width = images.shape
        hidden = []
        for length in (height, width):
            start = _integers(length, (samples, 1), generator).to(images.device) - self.size // 2
            place = torch.arange(length, device=images.device)
            hidden.append((place >= start) & (place < start + self.size))
        square = hidden[0][:, None, :, None] & hidden[1][:, None, None, :]
        return images.masked_fill(square, 0), labels


@dataclass(frozen=True)
class GaussianNoise:
    """Adds normal noise of this standard deviation; it moves no pixel, so that label maps stay.

    Examples:
        >>> images, labels = torch.zeros(1, 1, 2, 2), torch.tensor([7])
        >>> noisy, _ = eq.data.GaussianNoise(0.1)(images, labels, torch.Generator())
        >>> bool((noisy != 0).all())
        True
    """

    deviation: float

    def __post_init__(self) -> None:
        check_values(self, pixels=("deviation",))

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        noise = torch.randn(
            images.shape, generator=generator, dtype=images.dtype, device=generator.device
        )
        return images + self.deviation * noise.to(images.device), labels


@dataclass(frozen=True)
class Chain:
    """One augmentation after the other.

    Examples:
        >>> digits = eq.data.load_digits().test
        >>> from equilibria.data.augment import Chain
        >>> noisy = Chain((eq.data.GaussianNoise(0.1), eq.data.GaussianNoise(0.1)))
        >>> images, labels = noisy(digits.images[:2], digits.labels[:2], torch.Generator())
        >>> images.shape, labels.equal(digits.labels[:2])
        (torch.Size([2, 1, 8, 8]), True)
    """

    steps: tuple[Augmentation, ...]

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        for step in self.steps:
            images, labels = step(images, labels, generator)
        return images, labels


@dataclass(frozen=True)
class RandAugment:
    """Applies `operations` random operations of one `magnitude`, 0 to 30, to each image.

    Each is drawn uniformly from `OPERATIONS`, with replacement; those with a direction get a random
    sign. Images with the same operation are changed together. At magnitude 0 all but `autocontrast`
    and `equalize`, which have no strength, change nothing. Cubuk et al., "RandAugment: Practical
    automated data augmentation", 2020.
    """

    operations: int = 2
    magnitude: float = 9

    def __post_init__(self) -> None:
        check_values(self, not_negative=("operations",))
        if not 0 <= self.magnitude <= STRONGEST:
            raise ValueError(f"magnitude must be between 0 and {STRONGEST}, not {self.magnitude}")

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        _refuse_maps(self, images, labels)
        if images.shape[1] not in (1, 3):
            raise ValueError(
                f"RandAugment takes gray and RGB images, not images of {images.shape[1]} channels"
            )
        augmented = images.clone()
        for _ in range(self.operations):
            drawn = _integers(len(OPERATIONS), (len(images),), generator).to(images.device)
            sign = 2.0 * _integers(2, (len(images),), generator) - 1
            strength = (sign * (self.magnitude / STRONGEST)).to(images.device, images.dtype)
            for index, operation in enumerate(OPERATIONS.values()):
                chosen = (drawn == index).nonzero().squeeze(1)
                if len(chosen):
                    augmented[chosen] = operation(augmented[chosen], strength[chosen])
        return augmented, labels


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

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        has_maps = _has_maps(images, labels)
        low, high = self.scales
        chance = torch.rand(
            3, len(images), generator=generator, dtype=torch.float64, device=generator.device
        )
        scale = low + (high - low) * chance[0]
        (height, width), device = images.shape[2:], images.device
        row_inside, row, y = _draw_axis(height, self.size[0], scale, chance[1], device)
        column_inside, column, x = _draw_axis(width, self.size[1], scale, chance[2], device)
        inside = row_inside[:, :, None] & column_inside[:, None, :]
        right, down = x[:, None, :].expand(inside.shape), y[:, :, None].expand(inside.shape)
        # A pixel at the border has nothing beyond it to be mixed with.
        scaled = F.grid_sample(
            images,
            torch.stack((right, down), dim=3).to(images.dtype),
            mode="bilinear",
            padding_mode="border",
            align_corners=False,
        )
        if has_maps:
            range_of_labels = torch.iinfo(labels.dtype)
            if not range_of_labels.min <= self.ignore_index <= range_of_labels.max:
                raise ValueError(
                    f"labels of {labels.dtype} cannot hold the ignore_index {self.ignore_index}: "
                    "convert them, e.g. labels.long()"
                )
            sample = torch.arange(len(images), device=device)[:, None, None]
            nearest = labels[sample, row[:, :, None], column[:, None, :]]
            labels = torch.where(inside, nearest, self.ignore_index)
        return torch.where(inside[:, None], scaled, self.fill), labels


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


_augmentations: Registry[Augmentation] = Registry(
    "augmentation",
    factories={
        "crop": RandomCrop,
        "cutout": Cutout,
        "flip": RandomFlip,
        "noise": GaussianNoise,
        "randaugment": RandAugment,
        "scale_crop": RandomScaleCrop,
        "shift": RandomShift,
    },
)


def build_augmentation(step: str | Mapping[str, Any]) -> Augmentation:
    """An augmentation by its name, or by its name with options: `{"crop": {"padding": 4}}`.

    Examples:
        >>> from equilibria.data.augment import build_augmentation
        >>> build_augmentation({"shift": {"pixels": 2}})
        RandomShift(pixels=2)
    """
    if isinstance(step, str):
        return _augmentations.create(step)
    if len(step) != 1:
        raise ValueError(
            f"a step of augmentation is a name, or one name with options, not {dict(step)}"
        )
    ((name, options),) = step.items()
    return _augmentations.create(name, **(options or {}))
