"""How much noise a picture has, of the picture alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_NOISE = 1 / 255
"""What rounding to 256 levels, and all that is not known of a picture, amount to."""
SIDE = 8
"""Differences a side of a block, of 16×16 pixels."""
SMOOTHEST = 0.1
"""The share of the blocks that are taken for smooth."""
EXPOSED = (0.04, 0.96)
"""Between black and white, where noise is cut off."""


@torch.no_grad()
def noise_level(images: Tensor) -> float:
    """The deviation of white noise in images (B, C, H, W), of what their smoothest blocks show.

    Of every 2×2 pixels the diagonal difference (a − b − c + d)/2 is noise of the same deviation
    where a picture is smooth. Of its root mean squares over blocks, those in black and white left
    out, the lower tenth divides smooth blocks from others; of noise alone it is 1.28/√(2n) below
    the deviation, with n differences a block. At least a gray level of 256.

    Examples:
        >>> noise = 0.1 * torch.randn(1, 1, 64, 64)
        >>> 0.07 < eq.restoration.noise_level(0.5 + noise) < 0.13
        True
    """
    height, width = (size // 2 * 2 for size in images.shape[-2:])
    if min(height, width) < 2:
        raise ValueError("the noise of a picture of one row or column cannot be told: give it")
    pixels = images[..., :height, :width].double()
    rows = pixels[..., ::2, :] - pixels[..., 1::2, :]
    squares = ((rows[..., ::2] - rows[..., 1::2]) / 2).square()
    side = min(SIDE, height // 2, width // 2)
    power = F.avg_pool2d(squares, side).flatten()
    light = F.avg_pool2d(pixels, 2 * side).flatten()
    exposed = power[(light > EXPOSED[0]) & (light < EXPOSED[1])]
    power = exposed if len(exposed) else power
    quantile = float(power.sqrt().quantile(SMOOTHEST))
    below = 1.28 / math.sqrt(2 * side**2) if len(power) > 1 else 0.0
    return max(quantile / max(1 - below, 0.1), LEAST_NOISE)
