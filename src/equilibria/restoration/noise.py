"""Estimate of the noise level of a single picture."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_NOISE = 1 / 255
"""Smallest estimate. Rounding to 256 levels makes a smaller one meaningless."""
BLOCK_SIDE = 8
"""Differences per side of a block, which has 16×16 pixels."""
SMOOTH_QUANTILE = 0.1
"""Quantile of the blocks' noise that is taken as that of smooth blocks."""
UNCLIPPED = (0.04, 0.96)
"""Mean values of blocks whose noise is not clipped at black or white."""


@torch.no_grad()
def noise_level(images: Tensor) -> float:
    """Estimate the standard deviation of white noise from the smoothest blocks of images.

    In smooth areas the diagonal difference (a − b − c + d)/2 of 2×2 pixels is noise with the same
    standard deviation. The estimate is the 10 % quantile of its root mean square over blocks
    without black or white areas. For pure noise this quantile is smaller than the standard
    deviation by a factor 1 − 1.28/√(2n), with n differences per block, which is corrected.

    Args:
        images: Images, shape (B, C, H, W), pixels in [0, 1].

    Returns:
        The standard deviation as a fraction of the pixel range, at least 1/255.

    Raises:
        ValueError: If the images have a single row or column.

    Examples:
        >>> noise = 0.1 * torch.randn(1, 1, 64, 64)
        >>> 0.07 < eq.restoration.noise_level(0.5 + noise) < 0.13
        True
    """
    height, width = (size // 2 * 2 for size in images.shape[-2:])
    if min(height, width) < 2:
        raise ValueError(
            "noise cannot be estimated from a picture with one row or column; specify the noise"
        )
    pixels = images[..., :height, :width].double()
    rows = pixels[..., ::2, :] - pixels[..., 1::2, :]
    squares = ((rows[..., ::2] - rows[..., 1::2]) / 2).square()
    side = min(BLOCK_SIDE, height // 2, width // 2)
    power = F.avg_pool2d(squares, side).flatten()
    brightness = F.avg_pool2d(pixels, 2 * side).flatten()
    unclipped = power[(brightness > UNCLIPPED[0]) & (brightness < UNCLIPPED[1])]
    power = unclipped if len(unclipped) else power
    quantile = float(power.sqrt().quantile(SMOOTH_QUANTILE))
    bias = 1.28 / math.sqrt(2 * side**2) if len(power) > 1 else 0.0
    return max(quantile / max(1 - bias, 0.1), MIN_NOISE)
