"""Decoders: from a latent vector, through an equilibrium, to an image (JIIO, Section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from equilibria.activations import Activation
from equilibria.context import State
from equilibria.equilibrium import EquilibriumLayer
from equilibria.gradients import GradientRule
from equilibria.models.decoder_parts import (
    ImageHead,
    InjectedMDEQCell,
    LatentStem,
    equilibrium_size,
)
from equilibria.models.mdeq import branch_channels
from equilibria.models.opteq import opteq_cell, optimal_space
from equilibria.models.options import initialize_small, solver_from_options
from equilibria.operators import Conv2d
from equilibria.solvers import LinearSolution, Solution, Solver


class EquilibriumDecoder(nn.Module):
    """image = head(z*), z* the equilibrium for the injection stem(latent) (h and f of Eq. 20).

    Nothing in it draws at random or couples samples, so that `optimize_input` finds the latent of
    each image on its own. Images have values in [0, 1].
    """

    def __init__(
        self, stem: nn.Module, layer: EquilibriumLayer, head: nn.Module, *, latent_dim: int
    ) -> None:
        super().__init__()
        self.stem = stem
        self.layer = layer
        self.head = head
        self.latent_dim = latent_dim

    def forward(self, latents: Tensor, start: State | None = None) -> Tensor:
        images: Tensor = self.head(self.layer(self.stem(latents), start))
        return images

    def solve(self, latents: Tensor, start: State | None = None) -> Solution:
        """The equilibrium of each latent vector, with its status; no gradients."""
        return self.layer.solve(self.stem(latents), start)

    @property
    def last_solution(self) -> Solution | None:
        """How the last forward solve went."""
        return self.layer.last_solution

    @property
    def last_backward(self) -> LinearSolution | None:
        """How the last backward solve went."""
        return self.layer.last_backward


def mdeq_decoder(
    *,
    in_channels: int = 1,
    image_size: int = 28,
    latent_dim: int = 32,
    channels: int | Sequence[int] = (16, 32),
    expansion: int = 2,
    downsample: int = 2,
    head_channels: int = 32,
    activation: str | Activation = "relu",
    groups: int = 8,
    weight_norm: bool = True,
    init_gain: float = 0.05,
    feedback: float = 0.1,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumDecoder:
    """An MDEQ decoder: a linear map of the latent into each branch, and all branches to the image.

    `in_channels` are those of the images. `channels` has one number a branch, the finest first;
    the finest works at 1/`downsample` of the resolution, and the head makes up for it. All norms
    are group norms: inputs are optimized sample by sample.
    """
    widths = branch_channels(channels)
    size = equilibrium_size(image_size, downsample, len(widths))
    cell = InjectedMDEQCell(
        widths,
        expansion=expansion,
        activation=activation,
        groups=groups,
        weight_norm=weight_norm,
        init_gain=init_gain,
        feedback=feedback,
    )
    return EquilibriumDecoder(
        stem=LatentStem(latent_dim, widths, size),
        layer=EquilibriumLayer(
            cell=cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=ImageHead(widths, head_channels, in_channels, upsample=downsample, groups=groups),
        latent_dim=latent_dim,
    )


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
    activation: str | Activation = "relu",
    mu: float = 1.0,
    norm: Literal["bound", "estimate"] | None = "bound",
    zeta: float = 0.9,
    init_scale: float = 1.0,
    groups: int = 8,
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> EquilibriumDecoder:
    """An OptEq decoder: with norm="bound" its equilibrium exists, is unique and is reached."""
    size = equilibrium_size(image_size, downsample, 1)
    W = Conv2d(channels, width, kernel_size, norm=norm, zeta=zeta)
    U = Conv2d(channels, width, kernel_size)
    initialize_small(W, init_scale)
    cell = opteq_cell(
        W, U, bias=True, activation=activation, mu=mu, space=optimal_space(channels, width)
    )
    return EquilibriumDecoder(
        stem=LatentStem(latent_dim, (channels,), size),
        layer=EquilibriumLayer(
            cell=cell,
            solver=solver_from_options(solver, tolerance, max_iterations),
            gradient=gradient,
            strict=strict,
        ),
        head=ImageHead((channels,), head_channels, in_channels, upsample=downsample, groups=groups),
        latent_dim=latent_dim,
    )
