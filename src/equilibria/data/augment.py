"""Random changes of training images that leave their labels true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Augmentation: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""From images and a source of chance to images of the same shape."""


@dataclass(frozen=True)
class RandomShift:
    """Moves each image by up to `pixels` in each direction, with black moving in."""

    pixels: int = 1

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        samples, _, height, width = images.shape
        reach = self.pixels
        padded = F.pad(images, (reach, reach, reach, reach))
        corner = torch.randint(0, 2 * reach + 1, (2, samples, 1), generator=generator)
        rows = corner[0] + torch.arange(height)
        columns = corner[1] + torch.arange(width)
        sample = torch.arange(samples)[:, None, None]
        # Indices on both sides of the slice put the channels last.
        moved = padded[sample, :, rows[:, :, None], columns[:, None, :]]
        return moved.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class GaussianNoise:
    """Adds normal noise of this standard deviation."""

    deviation: float

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
        return images + self.deviation * noise


@dataclass(frozen=True)
class Chain:
    """One augmentation after the other."""

    steps: tuple[Augmentation, ...]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for step in self.steps:
            images = step(images, generator)
        return images
