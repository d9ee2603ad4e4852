"""The fourteen operations of RandAugment, on batches.

They are Pillow's, as the paper uses them, on floating-point images in [0, 1]: what Pillow rounds to
8 bits is not rounded here, except where the operation counts or masks bits (`equalize`,
`posterize`). Each takes its strength for every image, shape `(samples,)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

STRONGEST = 30
"""The magnitude at which every operation is at its strongest."""

LUMA = (0.299, 0.587, 0.114)
BRIGHTEST = 255


def autocontrast(images: Tensor) -> Tensor:
    """Stretches each channel so that its darkest value is 0 and its brightest 1."""
    low = images.amin(dim=(2, 3), keepdim=True)
    high = images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


def equalize(images: Tensor) -> Tensor:
    """Makes the histogram of each channel, over 256 levels, as even as a table of levels can."""
    levels = _levels(images).flatten(2).flatten(0, 1)
    count = torch.zeros(len(levels), BRIGHTEST + 1, dtype=torch.long, device=images.device)
    count.scatter_add_(1, levels, torch.ones_like(levels))
    brightest = levels.amax(dim=1, keepdim=True)
    step = (levels.shape[1] - count.gather(1, brightest)) // BRIGHTEST
    below = count.cumsum(dim=1) - count
    table = (step // 2 + below) // step.clamp_min(1)
    even = table.clamp_max(BRIGHTEST).gather(1, levels).to(images.dtype) / BRIGHTEST
    # Too few pixels, or one level only, to spread over 256.
    unchanged = (step == 0).reshape(*images.shape[:2], 1, 1)
    return torch.where(unchanged, images, even.reshape(images.shape))


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keeps the highest `bits` of 8; all eight leave an image as it is, even between levels."""
    kept = bits.long()[:, None, None, None]
    lost = (torch.ones_like(kept) << (8 - kept)) - 1
    masked = (_levels(images) & ~lost).to(images.dtype) / BRIGHTEST
    return torch.where(kept == 8, images, masked)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Inverts the values above the threshold."""
    return torch.where(images > threshold[:, None, None, None], 1 - images, images)


def gray(images: Tensor) -> Tensor:
    """Convert to luminance with one channel."""
    if images.shape[1] == 1:
        return images
    weights = images.new_tensor(LUMA)[:, None, None]
    return (images * weights).sum(dim=1, keepdim=True)


def smoothed(images: Tensor) -> Tensor:
    """By 3×3 pixels (center 5/13, neighbors 1/13), but not at the border."""
    if min(images.shape[2:]) < 3:
        return images
    kernel = images.new_ones(1, 1, 3, 3)
    kernel[..., 1, 1] = 5
    inner = F.conv2d(images.flatten(0, 1)[:, None], kernel / kernel.sum())
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = inner.reshape(*images.shape[:2], *inner.shape[2:])
    return smooth


def enhance(base: Tensor, images: Tensor, strength: Tensor) -> Tensor:
    """Away from the base, by a factor 1 + 0.9·strength; the image itself, bit for bit, at 0."""
    change = (0.9 * strength)[:, None, None, None] * (images - base)
    return (images + change).clamp(0, 1)


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turns the image counter-clockwise around its center."""
    angle = degrees.deg2rad()
    cosine, sine = angle.cos(), angle.sin()
    middle_x, middle_y = images.shape[3] / 2, images.shape[2] / 2
    return _affine(
        images,
        (cosine, -sine, middle_x - middle_x * cosine + middle_y * sine),
        (sine, cosine, middle_y - middle_x * sine - middle_y * cosine),
    )


Entry: TypeAlias = Tensor | float
"""Of an affine map: one number a sample, or one for all."""
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
    # The row y moves by −0.3·strength·y to the right (the column x downwards): the edge at 0 stays.
    "shear_x": lambda images, strength: _affine(images, (1, 0.3 * strength, 0), (0, 1, 0)),
    "shear_y": lambda images, strength: _affine(images, (1, 0, 0), (0.3 * strength, 1, 0)),
    # To the left, and upwards, by a share of the side.
    "translate_x": lambda images, strength: _affine(
        images, (1, 0, 150 / 331 * strength * images.shape[3]), (0, 1, 0)
    ),
    "translate_y": lambda images, strength: _affine(
        images, (1, 0, 0), (0, 1, 150 / 331 * strength * images.shape[2])
    ),
}
"""What each operation is at a strength between −1 and 1, the magnitude ÷ 30 with its sign."""


def _levels(images: Tensor) -> Tensor:
    """The nearest of 256 levels."""
    return (images * BRIGHTEST).round().long()


def _affine(images: Tensor, to_x: tuple[Entry, ...], to_y: tuple[Entry, ...]) -> Tensor:
    """The pixel at (x, y) from the one at (to_x · (x, y, 1), to_y · (x, y, 1)), or else black.

    Coordinates are those of pixel centers, x = column + ½; nearest neighbor, as in Pillow.
    """
    samples, channels, height, width = images.shape
    # Half precision cannot tell the pixels of a large image apart.
    kind = torch.promote_types(images.dtype, torch.float32)

    x = torch.arange(width, device=images.device, dtype=kind) + 0.5
    y = (torch.arange(height, device=images.device, dtype=kind) + 0.5)[:, None]

    def coordinate(of_x: Entry, of_y: Entry, offset: Entry) -> Tensor:
        a, b, c = (
            torch.as_tensor(entry, dtype=kind, device=images.device).expand(samples)[:, None, None]
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
