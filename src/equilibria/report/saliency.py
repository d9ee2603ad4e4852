"""Colors of saliency maps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SHADE = 0.55
"""Opacity of the map in an overlaid image."""


def signed(values: Tensor) -> Tensor:
    """Color maps (…, H, W) as (…, 3, H, W): blue for negative, white for zero, red for positive."""
    largest = values.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = values / largest.where(largest > 0, 1)
    ends = torch.tensor([[0.02, 0.44, 0.69], [0.82, 0.26, 0.12]], dtype=values.dtype)
    red = scaled.clamp_min(0)[..., None, :, :] * (1 - ends[1])[:, None, None]
    blue = (-scaled).clamp_min(0)[..., None, :, :] * (1 - ends[0])[:, None, None]
    return 1 - red - blue


def overlaid(images: Tensor, maps: Tensor) -> Tensor:
    """Overlay images with their maps, each colored from zero (blue) to its maximum (red)."""
    from matplotlib import colormaps

    largest = maps.amax(dim=(1, 2), keepdim=True)
    scaled = torch.where(largest > 0, maps / largest.where(largest > 0, 1), 0)
    size = images.shape[2:]
    scaled = F.interpolate(scaled[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    shades = torch.from_numpy(colormaps["turbo"](scaled.cpu().numpy())[..., :3]).permute(0, 3, 1, 2)
    return (1 - SHADE) * images.expand(-1, 3, -1, -1) + SHADE * shades.to(images)
