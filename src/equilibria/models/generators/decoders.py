"""Decoders from latent vectors to images with an equilibrium layer.

Gurumurthy et al., "Joint inference and input optimization in equilibrium networks", NeurIPS 2021,
Section 4.1 and Appendix C.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.equilibrium import EquilibriumLayer, Solving
from equilibria.models.base import EquilibriumModel
from equilibria.models.blocks import channels_of, fitting_groups, small
from equilibria.models.mdeq.cell import MDEQCell, unpack_branches
from equilibria.models.opteq.cells import OptEqCell
from equilibria.models.opteq.spaces import opteq_cell, optimal_space
from equilibria.models.registry import with_options_of
from equilibria.operators import Conv2d
from equilibria.registry import check_at_least_one, check_choice, check_positive

Readout = Literal["shuffle", "deconvolution"]
"""How a decoder upsamples the equilibrium to the resolution of the image."""


class EquilibriumDecoder(EquilibriumModel):
    """Decoder image = head(z*), z* the equilibrium for the input stem(latent) (JIIO Eq. 20).

    It is deterministic and does not couple samples, so `optimize_input` can find the latent of each
    image independently.

    Args:
        stem: From latents (B, latent_dim) to the input of the cell.
        layer: The equilibrium layer.
        head: From the feature z* to images (B, C, H, W) in [0, 1].
        latent_dim: Length of a latent vector.

    Examples:
        >>> decoder = eq.load("mnist-generator")
        >>> from equilibria.models.generators.decoders import EquilibriumDecoder
        >>> isinstance(decoder, EquilibriumDecoder), decoder.latent_dim
        (True, 24)
        >>> decoder(torch.zeros(1, 24)).shape
        torch.Size([1, 1, 28, 28])
    """

    def __init__(
        self, stem: nn.Module, layer: EquilibriumLayer, head: nn.Module, *, latent_dim: int
    ) -> None:
        super().__init__(stem, layer, head)
        self.latent_dim = latent_dim


class LatentStem(nn.Module):
    """One linear map from the latent to the input of each branch (JIIO, Appendix C.2).

    Args:
        latent_dim: Length of a latent vector.
        channels: Channels of each branch, the finest first.
        size: Side of the finest map; branch i has side size / 2ⁱ.
    """

    def __init__(self, latent_dim: int, channels: Sequence[int], size: int) -> None:
        super().__init__()
        check_at_least_one(latent_dim=latent_dim)
        self.latent_dim = latent_dim
        self.shapes = [(c, size // 2**i, size // 2**i) for i, c in enumerate(channels)]
        self.maps = nn.ModuleList(nn.Linear(latent_dim, c * h * w) for c, h, w in self.shapes)

    def forward(self, latents: Tensor) -> tuple[Tensor, ...]:
        if latents.dim() != 2 or latents.shape[1] != self.latent_dim:
            raise ValueError(
                f"expected latents of shape (batch, {self.latent_dim}), got {tuple(latents.shape)}"
            )
        return tuple(
            linear(latents).reshape(len(latents), *shape)
            for linear, shape in zip(self.maps, self.shapes, strict=True)
        )


class ImageHead(nn.Module):
    """Head from the branches to an image in [0, 1], by pixel shuffling (h of JIIO's Eq. 20).

    Coarser branches are upsampled, and a 1×1 convolution merges all branches, as in MDEQ's
    segmentation network.

    Args:
        channels: Channels of each branch, the finest first.
        width: Channels of the merged map.
        image_channels: Channels of the image.
        upsample: Factor from the side of the finest branch to that of the image.
        groups: Groups of the norm.
        gain: Factor of the initial weights of the last layer.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int,
        image_channels: int,
        *,
        upsample: int,
        groups: int,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        check_at_least_one(head_channels=width)
        self.channels = tuple(channels)
        self.merge = nn.Conv2d(sum(channels), width, 1)
        self.norm = nn.GroupNorm(fitting_groups(width, groups), width)
        self.draw = nn.Conv2d(width, image_channels * upsample**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upsample)
        _scale_weight(self.draw, gain)

    def forward(self, features: Tensor) -> Tensor:
        merged = F.relu(self.norm(self.merge(at_finest_size(features, self.channels))))
        return torch.sigmoid(self.shuffle(self.draw(merged)))


class DeconvolutionHead(nn.Module):
    """Head like `ImageHead` with transposed convolutions instead of pixel shuffling.

    Each doubles the side and halves the channels. The kernels overlap, so adjacent blocks of
    pixels depend on common features; pixel shuffling computes each block from separate ones.

    Args:
        channels: Channels of each branch, the finest first.
        width: Channels of the merged map.
        image_channels: Channels of the image.
        upsample: Factor from the side of the finest branch to that of the image: 2 or 4.
        groups: Groups of the norms.
        gain: Factor of the initial weights of the last layer.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int,
        image_channels: int,
        *,
        upsample: int,
        groups: int,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        check_at_least_one(head_channels=width)
        doublings = upsample.bit_length() - 1
        if doublings < 1:
            raise ValueError(
                "readout='deconvolution' needs downsample=2 or 4, got 1; set downsample, or "
                "readout='shuffle'"
            )
        self.channels = tuple(channels)
        self.merge = nn.Conv2d(sum(channels), width, 1)
        widths = [max(width // 2**i, 1) for i in range(doublings)]
        self.norms = nn.ModuleList(nn.GroupNorm(fitting_groups(w, groups), w) for w in widths)
        self.draw = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 4, 2, padding=1)
            for before, after in pairwise([*widths, image_channels])
        )
        _scale_weight(self.draw[-1], gain)

    def forward(self, features: Tensor) -> Tensor:
        maps = self.merge(at_finest_size(features, self.channels))
        for norm, double in zip(self.norms, self.draw, strict=True):
            maps = double(F.relu(norm(maps)))
        return torch.sigmoid(maps)


def _scale_weight(layer: nn.Module, gain: float) -> None:
    check_positive(head_gain=gain)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name == "weight":
                parameter.mul_(gain)


def at_finest_size(features: Tensor, channels: Sequence[int]) -> Tensor:
    """Unpack the branches and concatenate them, upsampled to the finest resolution.

    Args:
        features: Branches packed by `pack_branches`.
        channels: Channels of each branch, the finest first.
    """
    finest, *coarser = unpack_branches(features, tuple(channels))
    size = finest.shape[2:]
    return torch.cat([finest, *(F.interpolate(z, size, mode="nearest") for z in coarser)], dim=1)


HEADS: dict[Readout, type[ImageHead | DeconvolutionHead]] = {
    "shuffle": ImageHead,
    "deconvolution": DeconvolutionHead,
}


def equilibrium_size(image_size: int, downsample: int, branches: int) -> int:
    """Return the side of the map of the finest branch.

    Args:
        image_size: Side of the images.
        downsample: Factor from the map of the finest branch to the image.
        branches: Number of branches.
    """
    if downsample not in (1, 2, 4):
        raise ValueError(f"downsample must be 1, 2 or 4, got {downsample}")
    divisor = downsample * 2 ** (branches - 1)
    if image_size < 1 or image_size % divisor:
        raise ValueError(
            f"image_size must be divisible by {divisor} with downsample={downsample} and "
            f"{branches} branches, got {image_size}; pad or resize the images, or shorten "
            "channels, which has one number per branch"
        )
    return image_size // downsample


def _head(readout: Readout) -> type[ImageHead | DeconvolutionHead]:
    check_choice(HEADS, readout=readout)
    return HEADS[readout]


@with_options_of(MDEQCell, without=("norm", "dropout"))
def mdeq_decoder(
    *,
    in_channels: int = 1,
    image_size: int = 28,
    latent_dim: int = 32,
    channels: int | Sequence[int] = (16, 32),
    expansion: int = 2,
    downsample: int = 2,
    head_channels: int = 32,
    readout: Readout = "shuffle",
    head_gain: float = 1.0,
    groups: int = 8,
    solving: Solving | None = None,
    **cell: Any,
) -> EquilibriumDecoder:
    """Build an MDEQ decoder: a linear map from the latent to each branch, and a head for images.

    All norms are group norms, so that samples are independent.

    Args:
        in_channels: Channels of the images.
        image_size: Side of the images.
        latent_dim: Length of a latent vector.
        channels: Channels of each branch, the finest first.
        expansion: Ratio of the inner width of a residual block to its channels.
        downsample: Factor from the map of the finest branch to the image: 1, 2 or 4.
        head_channels: Channels of the head.
        readout: How the head upsamples: "shuffle" (pixel shuffling) or "deconvolution".
        head_gain: Factor of the initial weights of the layer before the sigmoid. With 4, a short
            training reaches saturated black and white, as in images of ink on paper.
        groups: Groups of the norms.
        solving: How the layer solves.
        cell: Options of `MDEQCell`.

    Examples:
        >>> from equilibria.models.generators.decoders import mdeq_decoder
        >>> decoder = mdeq_decoder(image_size=8, latent_dim=3, channels=(4, 8))
        >>> decoder(torch.rand(2, 3)).shape
        torch.Size([2, 1, 8, 8])
    """
    widths = channels_of(channels, "branch")
    size = equilibrium_size(image_size, downsample, len(widths))
    mdeq_cell = MDEQCell(widths, inject_all=True, expansion=expansion, groups=groups, **cell)
    return EquilibriumDecoder(
        LatentStem(latent_dim, widths, size),
        EquilibriumLayer(mdeq_cell, solving=solving),
        _head(readout)(
            widths,
            head_channels,
            in_channels,
            upsample=downsample,
            groups=groups,
            gain=head_gain,
        ),
        latent_dim=latent_dim,
    )


@with_options_of(OptEqCell, without=("bias",))
def opteq_decoder(
    *,
    in_channels: int = 1,
    image_size: int = 28,
    latent_dim: int = 32,
    channels: int = 24,
    width: int = 24,
    kernel_size: int = 5,
    downsample: int = 2,
    head_channels: int = 32,
    readout: Readout = "shuffle",
    head_gain: float = 1.0,
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 1.0,
    groups: int = 8,
    solving: Solving | None = None,
    **options: Any,
) -> EquilibriumDecoder:
    """Build an OptEq decoder; with norm="bound" its map is a contraction for every latent.

    Args:
        in_channels: Channels of the images.
        image_size: Side of the images.
        latent_dim: Length of a latent vector.
        channels: Channels of the feature z.
        width: Middle width, the channels of y.
        kernel_size: Side of the kernels of W and U.
        downsample: Factor from the map of the equilibrium to the image: 1, 2 or 4.
        head_channels: Channels of the head.
        readout: How the head upsamples: "shuffle" (pixel shuffling) or "deconvolution".
        head_gain: Factor of the initial weights of the layer before the sigmoid.
        norm: How ‖W‖ is controlled: "bound" (proven), "estimate", or None.
        zeta: Upper bound on ‖W‖.
        init_scale: Factor of W's initial weights.
        groups: Groups of the head's norms.
        solving: How the layer solves.
        options: Options of `OptEqCell`.

    Examples:
        >>> from equilibria.models.generators.decoders import opteq_decoder
        >>> decoder = opteq_decoder(image_size=8, latent_dim=4, channels=8, width=8)
        >>> decoder(torch.randn(2, 4)).shape
        torch.Size([2, 1, 8, 8])
    """
    size = equilibrium_size(image_size, downsample, 1)
    W = small(Conv2d(channels, width, kernel_size, norm=norm, zeta=zeta), init_scale)
    U = Conv2d(channels, width, kernel_size)
    cell = opteq_cell(W, U, bias=True, space=optimal_space(channels, width), **options)
    return EquilibriumDecoder(
        LatentStem(latent_dim, (channels,), size),
        EquilibriumLayer(cell, solving=solving),
        _head(readout)(
            (channels,),
            head_channels,
            in_channels,
            upsample=downsample,
            groups=groups,
            gain=head_gain,
        ),
        latent_dim=latent_dim,
    )
