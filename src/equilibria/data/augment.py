"""Random changes of training images that leave their labels true.

Images are batches of shape `(samples, channels, height, width)`, floating-point, on any device,
with values in [0, 1]. Chance comes from the generator alone, and is drawn where the generator
lives: a generator on the processor gives the same augmentation on every device.
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
class Normalize:
    """(image − mean) / std, channel by channel. Nothing random: apply it to test images as well.

    It ends the range [0, 1] that the other augmentations keep, so it comes last.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"give a mean and a std for each channel, not {len(self.mean)} and {len(self.std)}"
            )
        if not all(std > 0 for std in self.std):
            raise ValueError(f"std must be positive, not {self.std}")

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if images.shape[1] != len(self.mean):
            raise ValueError(
                f"the images have {images.shape[1]} channels, mean and std {len(self.mean)}"
            )
        mean, std = (images.new_tensor(v)[:, None, None] for v in (self.mean, self.std))
        return (images - mean) / std


@dataclass(frozen=True)
class Chain:
    """One augmentation after the other."""

    steps: tuple[Augmentation, ...]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for step in self.steps:
            images = step(images, generator)
        return images


_augmentations: Registry[Augmentation] = Registry("augmentation")
_augmentations.register("crop", RandomCrop)
_augmentations.register("cutout", Cutout)
_augmentations.register("flip", RandomFlip)
_augmentations.register("noise", GaussianNoise)
_augmentations.register("randaugment", RandAugment)
_augmentations.register("shift", RandomShift)


def build_augmentation(step: str | Mapping[str, Any]) -> Augmentation:
    """An augmentation by its name, or by its name with options: `{"crop": {"padding": 4}}`."""
    return build_step(_augmentations, step)


def build_step(registry: Registry[T], step: str | Mapping[str, Any]) -> T:
    """What a name, or one name with its options, stands for in this registry."""
    if isinstance(step, str):
        return registry.create(step)
    if len(step) != 1:
        raise ValueError(
            f"a step of augmentation is a name, or one name with options, not {dict(step)}"
        )
    ((name, options),) = step.items()
    return registry.create(name, **(options or {}))
