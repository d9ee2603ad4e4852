"""Decoders: from a latent vector, through an equilibrium, to an image.

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
"""How a head goes from the equilibrium's maps to the pixels."""


class EquilibriumDecoder(EquilibriumModel):
    """image = head(z*), z* the equilibrium for the injection stem(latent) (h and f of Eq. 20).

    Nothing in it draws at random or couples samples, so that `optimize_input` finds the latent of
    each image on its own. Images have values in [0, 1].

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
    """One linear map of the latent into each branch (Appendix C.2).

    Branch i has `channels[i]` channels on a map of `size`/2ⁱ a side.
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
                f"expected latents of shape (batch, {self.latent_dim}), not {tuple(latents.shape)}"
            )
        return tuple(
            linear(latents).reshape(len(latents), *shape)
            for linear, shape in zip(self.maps, self.shapes, strict=True)
        )


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
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        check_at_least_one(head_channels=width)
        self.channels = tuple(channels)
        self.merge = nn.Conv2d(sum(channels), width, 1)
        self.norm = nn.GroupNorm(fitting_groups(width, groups), width)
        self.draw = nn.Conv2d(width, image_channels * upsample**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upsample)
        _amplify(self.draw, gain)

    def forward(self, features: Tensor) -> Tensor:
        merged = F.relu(self.norm(self.merge(at_finest_size(features, self.channels))))
        return torch.sigmoid(self.shuffle(self.draw(merged)))


class DeconvolutionHead(nn.Module):
    """As `ImageHead`, but transposed convolutions lead from the finest branch to the image.

    Each doubles the side and halves the channels: an edge is drawn with what its neighbors know,
    where pixel shuffling draws every block of pixels from one place.
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
                "readout='deconvolution' raises the resolution: give downsample=2 or 4, or "
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
        _amplify(self.draw[-1], gain)

    def forward(self, features: Tensor) -> Tensor:
        maps = self.merge(at_finest_size(features, self.channels))
        for norm, double in zip(self.norms, self.draw, strict=True):
            maps = double(F.relu(norm(maps)))
        return torch.sigmoid(maps)


def _amplify(last: nn.Module, gain: float) -> None:
    """Multiply the first weights of the layer that the sigmoid of an image sees."""
    check_positive(head_gain=gain)
    with torch.no_grad():
        for name, parameter in last.named_parameters():
            if name == "weight":
                parameter.mul_(gain)


def at_finest_size(features: Tensor, channels: Sequence[int]) -> Tensor:
    """All branches side by side, the coarser ones repeated."""
    finest, *coarser = unpack_branches(features, tuple(channels))
    size = finest.shape[2:]
    return torch.cat([finest, *(F.interpolate(z, size, mode="nearest") for z in coarser)], dim=1)


HEADS: dict[Readout, type[ImageHead | DeconvolutionHead]] = {
    "shuffle": ImageHead,
    "deconvolution": DeconvolutionHead,
}


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
    """An MDEQ decoder: a linear map of the latent into each branch, and all branches to the image.

    `in_channels` are those of the images. `channels` has one number a branch, the finest first;
    the finest works at 1/`downsample` of the resolution, and the head makes up for it, by pixel
    shuffling or transposed convolutions (`readout`). `head_gain` multiplies the first weights of
    the layer before the sigmoid: with 4 a short training gets to black and white where there is
    ink on paper, and leaves no gray. All norms are group norms: inputs are optimized sample by
    sample.

    Examples:
        >>> from equilibria.models.generators.decoders import mdeq_decoder
        >>> decoder = mdeq_decoder(image_size=8, latent_dim=3, channels=(4, 8))
        >>> decoder(torch.rand(2, 3)).shape
        torch.Size([2, 1, 8, 8])
    """
    widths = channels_of(channels, "branch")
    size = equilibrium_size(image_size, downsample, len(widths))
    made = MDEQCell(widths, inject_all=True, expansion=expansion, groups=groups, **cell)
    return EquilibriumDecoder(
        LatentStem(latent_dim, widths, size),
        EquilibriumLayer(made, solving=solving),
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
    """An OptEq decoder: with norm="bound" its equilibrium exists, is unique and is reached.

    `readout` and `head_gain` are those of `mdeq_decoder`.

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
