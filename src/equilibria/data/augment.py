"""Random augmentations of training images.

Images are batches of shape (B, C, H, W), floating-point, on any device, with values in [0, 1].
Class labels do not change; label maps, shape (B, H, W), move along with their pixels. Random
numbers are drawn on the generator's device, so that a generator on the CPU gives the same
augmentation on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.data.randaugment import MAX_MAGNITUDE, OPERATIONS
from equilibria.registry import Registry, check_values

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Images and their labels: one per image, or a map with one per pixel."""

Augmentation: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], Batch]
"""Function of images, labels and a random generator that returns new images and labels."""


def _has_maps(images: Tensor, labels: Tensor) -> bool:
    """Whether every pixel has a label; raise if the label maps do not fit the images."""
    if labels.dim() < 3:
        return False
    if images.dim() != 4 or labels.shape != (len(images), *images.shape[2:]):
        raise ValueError(
            "images must have shape (B, C, H, W) and label maps shape (B, H, W), got "
            f"{tuple(images.shape)} and {tuple(labels.shape)}"
        )
    return True


def _refuse_maps(augmentation: Augmentation, images: Tensor, labels: Tensor) -> None:
    if _has_maps(images, labels):
        raise ValueError(
            f"{augmentation} does not support label maps: use scale_crop, flip or noise for "
            "segmentation"
        )


def _integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=generator, device=generator.device)


@dataclass(frozen=True)
class RandomCrop:
    """Random crops of padded images; the size does not change.

    Args:
        padding: Number of pixels added on every side before the crop.
        mode: Padding values: "zero", or "reflect" for the image reflected at its edge.
    """

    padding: int = 4
    mode: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        check_values(self, not_negative=("padding",), one_of={"mode": ("zero", "reflect")})

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        _refuse_maps(self, images, labels)
        samples, _, height, width = images.shape
        padding = self.padding
        if self.mode == "reflect" and padding >= min(height, width):
            raise ValueError(
                f"padding with mode='reflect' must be smaller than the image, got {padding} for "
                f"images of {height}×{width}: use a smaller padding or mode='zero'"
            )
        mode = "constant" if self.mode == "zero" else "reflect"
        padded = F.pad(images, (padding, padding, padding, padding), mode=mode)
        corner = _integers(2 * padding + 1, (2, samples), generator).to(images.device)
        # `unfold` makes views; indexing copies only the windows that were drawn.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        sample = torch.arange(samples, device=images.device)
        return windows[sample, :, corner[0], corner[1]], labels


@dataclass(frozen=True)
class RandomShift:
    """Random translations by up to `pixels` in each direction; vacated pixels become black.

    Args:
        pixels: Largest translation, in pixels.

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
    """Random horizontal flips.

    Args:
        probability: Probability that an image is flipped.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_values(self, fraction=("probability",))

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        uniform = torch.rand(len(images), generator=generator, device=generator.device)
        flipped = (uniform < self.probability).to(images.device)[:, None, None, None]
        if _has_maps(images, labels):
            labels = torch.where(flipped[:, 0], labels.flip(2), labels)
        return torch.where(flipped, images.flip(3), images), labels


@dataclass(frozen=True)
class Cutout:
    """Black squares around a random pixel of each image; they may extend beyond the edge.

    DeVries and Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout".

    Args:
        size: Side of the square, in pixels.
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
            position = torch.arange(length, device=images.device)
            hidden.append((position >= start) & (position < start + self.size))
        square = hidden[0][:, None, :, None] & hidden[1][:, None, None, :]
        return images.masked_fill(square, 0), labels


@dataclass(frozen=True)
class GaussianNoise:
    """Additive Gaussian noise. Label maps do not change.

    Args:
        deviation: Standard deviation of the noise, as a fraction of the pixel range [0, 1].

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
    """A sequence of augmentations, applied in order.

    Args:
        steps: The augmentations.

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
    """Random operations of one magnitude on each image (RandAugment).

    Operations are drawn uniformly from `OPERATIONS`, with replacement. Operations with a direction
    get a random sign. At magnitude 0 every operation is the identity except `autocontrast` and
    `equalize`, which have no strength. Cubuk et al., "RandAugment: Practical automated data
    augmentation", 2020.

    Args:
        operations: Number of operations per image.
        magnitude: Strength of the operations, 0 to 30.
    """

    operations: int = 2
    magnitude: float = 9

    def __post_init__(self) -> None:
        check_values(self, not_negative=("operations",))
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude must be in [0, {MAX_MAGNITUDE}], got {self.magnitude}")

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        _refuse_maps(self, images, labels)
        if images.shape[1] not in (1, 3):
            raise ValueError(
                f"RandAugment needs gray or RGB images, got images with {images.shape[1]} channels"
            )
        augmented = images.clone()
        for _ in range(self.operations):
            drawn = _integers(len(OPERATIONS), (len(images),), generator).to(images.device)
            sign = 2.0 * _integers(2, (len(images),), generator) - 1
            strength = (sign * (self.magnitude / MAX_MAGNITUDE)).to(images.device, images.dtype)
            for index, operation in enumerate(OPERATIONS.values()):
                chosen = (drawn == index).nonzero().squeeze(1)
                if len(chosen):
                    augmented[chosen] = operation(augmented[chosen], strength[chosen])
        return augmented, labels


@dataclass(frozen=True)
class RandomScaleCrop:
    """Random scaling followed by a random crop; with scales=(1, 1) only a random crop.

    Images are interpolated bilinearly, without antialiasing; labels take the nearest pixel. A
    scaled image that is smaller than the crop is placed in it at random.

    Args:
        size: Height and width of the crop, in pixels.
        scales: Smallest and largest scale factor; factors are drawn uniformly.
        ignore_index: Label of pixels outside the scaled image.
        fill: Value of pixels outside the scaled image.
    """

    size: tuple[int, int]
    scales: tuple[float, float] = (0.5, 2.0)
    ignore_index: int = 255
    fill: float = 0.0

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"size must be positive, got {self.size}")
        if not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales must be positive and in ascending order, got {self.scales}")

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        has_maps = _has_maps(images, labels)
        low, high = self.scales
        uniform = torch.rand(
            3, len(images), generator=generator, dtype=torch.float64, device=generator.device
        )
        scale = low + (high - low) * uniform[0]
        (height, width), device = images.shape[2:], images.device
        row_inside, row, y = _crop_axis(height, self.size[0], scale, uniform[1], device)
        column_inside, column, x = _crop_axis(width, self.size[1], scale, uniform[2], device)
        inside = row_inside[:, :, None] & column_inside[:, None, :]
        right, down = x[:, None, :].expand(inside.shape), y[:, :, None].expand(inside.shape)
        # Without border padding, pixels at the edge would be blended with black.
        scaled = F.grid_sample(
            images,
            torch.stack((right, down), dim=3).to(images.dtype),
            mode="bilinear",
            padding_mode="border",
            align_corners=False,
        )
        if has_maps:
            label_range = torch.iinfo(labels.dtype)
            if not label_range.min <= self.ignore_index <= label_range.max:
                raise ValueError(
                    f"labels of {labels.dtype} cannot represent ignore_index={self.ignore_index}: "
                    "convert them with labels.long()"
                )
            sample = torch.arange(len(images), device=device)[:, None, None]
            nearest = labels[sample, row[:, :, None], column[:, None, :]]
            labels = torch.where(inside, nearest, self.ignore_index)
        return torch.where(inside[:, None], scaled, self.fill), labels


def _crop_axis(
    length: int, size: int, scale: Tensor, uniform: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the pixels of a crop come from along one axis, three of shape (B, size).

    These are whether a pixel is inside the image, the index of the nearest pixel, and the center
    of the pixel in coordinates of `grid_sample`, where the axis extends from −1 to 1.
    """
    scaled = (length * scale).round().clamp_min(1)
    excess = scaled - size
    first = excess.clamp_max(0) + (uniform * (excess.abs() + 1)).floor()
    position = first[:, None] + torch.arange(size, device=scale.device)
    center = (position + 0.5) * (length / scaled)[:, None]
    inside = (position >= 0) & (position < scaled[:, None])
    nearest = center.floor().clamp(0, length - 1).long()
    # Not every device supports float64.
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
    """Build an augmentation from its configuration.

    Args:
        step: Name of the augmentation, or a mapping from its name to its options, such as
            `{"crop": {"padding": 4}}`.

    Examples:
        >>> from equilibria.data.augment import build_augmentation
        >>> build_augmentation({"shift": {"pixels": 2}})
        RandomShift(pixels=2)
    """
    if isinstance(step, str):
        return _augmentations.create(step)
    if len(step) != 1:
        raise ValueError(
            "an augmentation must be a name or a mapping from one name to its options, got "
            f"{dict(step)}"
        )
    ((name, options),) = step.items()
    return _augmentations.create(name, **(options or {}))
