"""What is around a decoder's equilibrium: from a latent vector to injections, and to an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context import Context
from equilibria.models.mdeq import MDEQCell, ResidualBlock
from equilibria.models.mdeq_layers import fitting_groups
from equilibria.models.mdeq_parts import pack_branches, unpack_branches


class LatentStem(nn.Module):
    """One linear map of the latent into each branch (Appendix C.2), all in one tensor.

    Branch i has `channels[i]` channels on a map of `size`/2ⁱ a side; they are joined as
    `pack_branches` joins them.
    """

    def __init__(self, latent_dim: int, channels: Sequence[int], size: int) -> None:
        super().__init__()
        if latent_dim < 1:
            raise ValueError(f"latent_dim must be at least 1, not {latent_dim}")
        self.latent_dim = latent_dim
        self.shapes = [(c, size // 2**i, size // 2**i) for i, c in enumerate(channels)]
        self.maps = nn.ModuleList(nn.Linear(latent_dim, c * h * w) for c, h, w in self.shapes)

    def forward(self, latents: Tensor) -> Tensor:
        if latents.dim() != 2 or latents.shape[1] != self.latent_dim:
            raise ValueError(
                f"expected latents of shape (batch, {self.latent_dim}), not {tuple(latents.shape)}"
            )
        return pack_branches(
            [
                linear(latents).reshape(len(latents), *shape)
                for linear, shape in zip(self.maps, self.shapes, strict=True)
            ]
        )


class InjectedMDEQCell(MDEQCell):
    """An MDEQ cell with an injection of its own into every branch, as `LatentStem` makes them."""

    def __init__(self, channels: Sequence[int], **options: Any) -> None:
        super().__init__(channels, **options)
        with torch.no_grad():
            # Every branch carries an injection on; one alone is all feedback, as in `MDEQCell`.
            for block in self.blocks if len(self.channels) > 1 else ():
                assert isinstance(block, ResidualBlock)
                block.output_norm.weight.fill_(1.0)

    def inject(self, x: Tensor) -> Context:
        finest, *coarser = unpack_branches(x, self.channels)
        return super().inject(finest).with_sample(coarser_injections=tuple(coarser))


class ImageHead(nn.Module):
    """All branches at the finest resolution, a convolution, and the image, in [0, 1] (h of Eq. 20).

    Coarser branches are upsampled, and a 1×1 convolution merges all, as in MDEQ's segmentation
    network. `upsample` is the factor from the finest branch to the image, by pixel shuffling.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int,
        image_channels: int,
        *,
        upsample: int,
        groups: int,
    ) -> None:
        super().__init__()
        self.channels = tuple(channels)
        self.merge = nn.Conv2d(sum(channels), width, 1)
        self.norm = nn.GroupNorm(fitting_groups(width, groups), width)
        self.draw = nn.Conv2d(width, image_channels * upsample**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upsample)

    def forward(self, features: Tensor) -> Tensor:
        finest, *coarser = unpack_branches(features, self.channels)
        size = finest.shape[2:]
        maps = [finest, *(F.interpolate(z, size, mode="nearest") for z in coarser)]
        merged = F.relu(self.norm(self.merge(torch.cat(maps, dim=1))))
        return torch.sigmoid(self.shuffle(self.draw(merged)))


def equilibrium_size(image_size: int, downsample: int, branches: int) -> int:
    """The side of the finest branch's map."""
    if downsample not in (1, 2, 4):
        raise ValueError(f"downsample must be 1, 2 or 4, not {downsample}")
    divisor = downsample * 2 ** (branches - 1)
    if image_size < 1 or image_size % divisor:
        raise ValueError(
            f"images of {image_size} pixels a side do not fit downsample={downsample} with "
            f"{branches} branches: the side must be divisible by {divisor}; pad or resize the "
            "images, or give fewer channels (one number a branch)"
        )
    return image_size // downsample
