"""Measurements: what is seen of an image, as a differentiable map A with its transpose.

A is applied to images `(samples, channels, height, width)`. Any differentiable callable will do
where one of these is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

Measurement = Callable[[Tensor], Tensor]
"""A: from images to what is seen of them, sample by sample."""


class LinearMeasurement(ABC):
    """A linear A, with its exact transpose and a picture of what it leaves."""

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """A applied to images."""

    @abstractmethod
    def adjoint(self, measured: Tensor) -> Tensor:
        """Aᵀ applied to measurements: ⟨Ax, y⟩ = ⟨x, Aᵀy⟩."""

    def picture(self, measured: Tensor) -> Tensor:
        """The measurement as an image of the size of the original."""
        return measured


@dataclass(frozen=True)
class Everything(LinearMeasurement):
    """A = I: every pixel is seen."""

    def __call__(self, images: Tensor) -> Tensor:
        return images

    def adjoint(self, measured: Tensor) -> Tensor:
        return measured


@dataclass(frozen=True, eq=False)
class Mask(LinearMeasurement):
    """A = diag(known): pixels where `known` is 0 are hidden, and seen as 0.

    known: zeros and ones that fit the images, such as `(samples, 1, height, width)`.
    """

    known: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        return images * self.known.to(images)

    def adjoint(self, measured: Tensor) -> Tensor:
        return self(measured)

    def fill(self, measured: Tensor, images: Tensor) -> Tensor:
        """What was seen, completed by `images` where nothing was."""
        known = self.known.to(images)
        return known * measured + (1 - known) * images


@dataclass(frozen=True)
class Blur(LinearMeasurement):
    """A: a Gaussian blur of standard deviation `width` pixels; images are reflected at the edge."""

    width: float

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise ValueError(f"the width of a blur must be positive, not {self.width}")

    @property
    def reach(self) -> int:
        """Pixels from the center of the kernel to its end: three standard deviations."""
        return max(1, ceil(3 * self.width))

    def __call__(self, images: Tensor) -> Tensor:
        if min(images.shape[2:]) <= self.reach:
            raise ValueError(
                f"a blur of width {self.width:g} needs images of more than {self.reach} pixels a "
                f"side, not {images.shape[2]}×{images.shape[3]}"
            )
        steps = torch.arange(-self.reach, self.reach + 1, dtype=images.dtype, device=images.device)
        weights = torch.exp(-0.5 * (steps / self.width).square())
        kernel = (weights / weights.sum()).expand(images.shape[1], 1, -1)
        padded = F.pad(images, (self.reach,) * 4, mode="reflect")
        rows = F.conv2d(padded, kernel[:, :, None, :], groups=images.shape[1])
        return F.conv2d(rows, kernel[:, :, :, None], groups=images.shape[1])

    def adjoint(self, measured: Tensor) -> Tensor:
        return transpose(self, measured, measured.shape)


@dataclass(frozen=True)
class Downsampling(LinearMeasurement):
    """A: the mean over blocks of `factor`×`factor` pixels."""

    factor: int

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"the factor of a downsampling must be at least 2, not {self.factor}")

    def __call__(self, images: Tensor) -> Tensor:
        if any(size % self.factor for size in images.shape[2:]):
            raise ValueError(
                f"images of {images.shape[2]}×{images.shape[3]} do not divide into blocks of "
                f"{self.factor}×{self.factor}: choose another factor, or another size"
            )
        return F.avg_pool2d(images, self.factor)

    def adjoint(self, measured: Tensor) -> Tensor:
        return self.picture(measured) / self.factor**2

    def picture(self, measured: Tensor) -> Tensor:
        return F.interpolate(measured, scale_factor=self.factor, mode="nearest")


def transpose(measurement: Measurement, measured: Tensor, image_shape: torch.Size) -> Tensor:
    """Aᵀ applied to measurements, by automatic differentiation: for any A that is linear."""
    differentiable = torch.is_grad_enabled() and measured.requires_grad
    with torch.enable_grad():
        images = measured.new_zeros(image_shape).requires_grad_()
        seen = measurement(images)
    (pulled,) = torch.autograd.grad(seen, images, measured, create_graph=differentiable)
    return pulled


def picture_of(measurement: Measurement, measured: Tensor, size: tuple[int, ...]) -> Tensor | None:
    """The measurement as an image of this height and width; None where it is no picture."""
    if isinstance(measurement, LinearMeasurement):
        return measurement.picture(measured)
    is_picture = measured.dim() == 4 and tuple(measured.shape[2:]) == tuple(size)
    return measured if is_picture else None
