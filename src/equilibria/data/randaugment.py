"""The fourteen operations of RandAugment, on batches.

They are the Pillow operations that the paper uses, for floating-point images in [0, 1]. Results
that Pillow rounds to 8 bits are not rounded here, except in `equalize` and `posterize`, which
count or mask bits. Strengths are per image, shape (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_MAGNITUDE = 30
"""Magnitude at which every operation has its full strength."""

LUMA = (0.299, 0.587, 0.114)
BRIGHTEST = 255


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel so that its darkest value is 0 and its brightest 1."""
    low = images.amin(dim=(2, 3), keepdim=True)
    high = images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel over 256 levels."""
    levels = _levels(images).flatten(2).flatten(0, 1)
    count = torch.zeros(len(levels), BRIGHTEST + 1, dtype=torch.long, device=images.device)
    count.scatter_add_(1, levels, torch.ones_like(levels))
    brightest = levels.amax(dim=1, keepdim=True)
    step = (levels.shape[1] - count.gather(1, brightest)) // BRIGHTEST
    below = count.cumsum(dim=1) - count
    table = (step // 2 + below) // step.clamp_min(1)
    even = table.clamp_max(BRIGHTEST).gather(1, levels).to(images.dtype) / BRIGHTEST
    # There are too few pixels, or there is only one level, to spread over 256.
    unchanged = (step == 0).reshape(*images.shape[:2], 1, 1)
    return torch.where(unchanged, images, even.reshape(images.shape))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits of 8-bit pixels; with all eight, do not round."""
    kept = bits.long()[:, None, None, None]
    lost = (torch.ones_like(kept) << (8 - kept)) - 1
    masked = (_levels(images) & ~lost).to(images.dtype) / BRIGHTEST
    return torch.where(kept == 8, images, masked)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values above the threshold."""
    return torch.where(images > threshold[:, None, None, None], 1 - images, images)


def gray(images: Tensor) -> Tensor:
    """Convert to luminance with one channel."""
    if images.shape[1] == 1:
        return images
    weights = images.new_tensor(LUMA)[:, None, None]
    return (images * weights).sum(dim=1, keepdim=True)


def smoothed(images: Tensor) -> Tensor:
    """Smooth by 3×3 pixels (center 5/13, neighbors 1/13), except at the border."""
    if min(images.shape[2:]) < 3:
        return images
    kernel = images.new_ones(1, 1, 3, 3)
    kernel[..., 1, 1] = 5
    inner = F.conv2d(images.flatten(0, 1)[:, None], kernel / kernel.sum())
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = inner.reshape(*images.shape[:2], *inner.shape[2:])
    return smooth


def enhance(base: Tensor, images: Tensor, strength: Tensor) -> Tensor:
    """Extrapolate from `base` by a factor 1 + 0.9·strength; strength 0 is the exact identity."""
    change = (0.9 * strength)[:, None, None, None] * (images - base)
    return (images + change).clamp(0, 1)


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate counter-clockwise around the center."""
    angle = degrees.deg2rad()
    cosine, sine = angle.cos(), angle.sin()
    middle_x, middle_y = images.shape[3] / 2, images.shape[2] / 2
    return _affine(
        images,
        (cosine, -sine, middle_x - middle_x * cosine + middle_y * sine),
        (sine, cosine, middle_y - middle_x * sine - middle_y * cosine),
    )


Entry: TypeAlias = Tensor | float
"""Entry of an affine map: one number per sample, or one for all."""
Operation: TypeAlias = Callable[[Tensor, Tensor], Tensor]

OPERATIONS: dict[str, Operation] = {
    "identity": lambda images, strength: images,
    "autocontrast": lambda images, strength: autocontrast(images),
    "equalize": lambda images, strength: equalize(images),
    "rotate": lambda images, strength: rotate(images, 30 * strength),
    "solarize": lambda images, strength: solarize(images, 1 - strength.abs()),
    "color": lambda images, strength: enhance(gray(images), images, strength),
    "posterize": lambda images, strength: posterize(images, 8 - (4 * strength.abs()).round()),
    "contrast": lambda images, strength: enhance(
        gray(images).mean(dim=(2, 3), keepdim=True), images, strength
    ),
    "brightness": lambda images, strength: enhance(torch.zeros_like(images), images, strength),
    "sharpness": lambda images, strength: enhance(smoothed(images), images, strength),
    # Row y moves by −0.3·strength·y to the right (column x downwards): the edge at 0 is fixed.
    "shear_x": lambda images, strength: _affine(images, (1, 0.3 * strength, 0), (0, 1, 0)),
    "shear_y": lambda images, strength: _affine(images, (1, 0, 0), (0.3 * strength, 1, 0)),
    # To the left and upwards, by a fraction of the side.
    "translate_x": lambda images, strength: _affine(
        images, (1, 0, 150 / 331 * strength * images.shape[3]), (0, 1, 0)
    ),
    "translate_y": lambda images, strength: _affine(
        images, (1, 0, 0), (0, 1, 150 / 331 * strength * images.shape[2])
    ),
}
"""Operations by name; the strength is in [−1, 1], the magnitude ÷ 30 with a sign."""


def _levels(images: Tensor) -> Tensor:
    """Round to 256 levels."""
    return (images * BRIGHTEST).round().long()


def _affine(images: Tensor, to_x: tuple[Entry, ...], to_y: tuple[Entry, ...]) -> Tensor:
    """Fill the pixel at (x, y) from (to_x · (x, y, 1), to_y · (x, y, 1)); black outside the image.

    Coordinates are those of pixel centers, x = column + ½. As in Pillow, the nearest pixel counts.
    """
    samples, channels, height, width = images.shape
    # Half precision cannot represent the coordinates of a large image.
    dtype = torch.promote_types(images.dtype, torch.float32)

    x = torch.arange(width, device=images.device, dtype=dtype) + 0.5
    y = (torch.arange(height, device=images.device, dtype=dtype) + 0.5)[:, None]

    def coordinate(of_x: Entry, of_y: Entry, offset: Entry) -> Tensor:
        a, b, c = (
            torch.as_tensor(entry, dtype=dtype, device=images.device).expand(samples)[:, None, None]
            for entry in (of_x, of_y, offset)
        )
        return a * x + b * y + c

    columns, rows = coordinate(*to_x), coordinate(*to_y)
    column, row = columns.floor().long(), rows.floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    index = source.flatten(1)[:, None].expand(samples, channels, height * width)
    moved = images.flatten(2).gather(2, index).reshape(images.shape)
    return moved * inside[:, None]
