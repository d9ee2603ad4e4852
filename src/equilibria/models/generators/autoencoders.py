"""Autoencoders, the baselines of decoder-only generators (JIIO, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.equilibrium import Solving
from equilibria.models.blocks import ImageLayers
from equilibria.models.generators.decoders import mdeq_decoder
from equilibria.models.mdeq.model import mdeq
from equilibria.registry import check_at_least_one
from equilibria.solvers import Solution

SMALLEST_MAP = 4
"""Smallest side of a map; larger even ones are halved."""
LARGEST_LOG_VARIANCE = 15.0


class Autoencoder(nn.Module):
    """Autoencoder, plain or variational.

    A variational autoencoder reconstructs from the mean of the posterior; training draws from it.

    Args:
        encoder: From images to latents (B, latent_dim); if `variational`, to their mean and
            log-variance, (B, 2 · latent_dim).
        decoder: From latents to images.
        latent_dim: Length of a latent vector.
        variational: Whether the encoder computes a mean and a log-variance.

    Examples:
        >>> from equilibria.models.generators.autoencoders import convolutional_autoencoder
        >>> model = convolutional_autoencoder(image_size=8, latent_dim=3, width=4)
        >>> images = torch.rand(2, 1, 8, 8)
        >>> model.encode(images).shape, model(images).shape
        (torch.Size([2, 3]), torch.Size([2, 1, 8, 8]))
    """

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, *, latent_dim: int, variational: bool
    ) -> None:
        super().__init__()
        check_at_least_one(latent_dim=latent_dim)
        self.encoder = encoder
        self.decoder = decoder
        self.latent_dim = latent_dim
        self.variational = variational

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.encode(images))

    def encode(self, images: Tensor) -> Tensor:
        """Return the latent of each image, (B, latent_dim); if variational, the posterior mean."""
        return self.posterior(images)[0]

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance of the latents; the latter is −∞ if not variational."""
        codes: Tensor = self.encoder(images)
        if not self.variational:
            return codes, torch.full_like(codes, -torch.inf)
        mean, log_variance = codes.chunk(2, dim=1)
        return mean, log_variance.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)

    def decode(self, latents: Tensor) -> Tensor:
        """Return the images for latents of shape (B, latent_dim)."""
        images: Tensor = self.decoder(latents)
        return images

    @property
    def last_solution(self) -> Solution | None:
        """Solution of the decoder's last solve; None if it has no equilibrium layer."""
        solution = getattr(self.decoder, "last_solution", None)
        return solution if isinstance(solution, Solution) else None


class ConvolutionalEncoder(nn.Module):
    """4×4 convolutions of stride 2 with batch norm and ReLU, then a linear map (as in RAE)."""

    def __init__(self, in_channels: int, image_size: int, width: int, outputs: int) -> None:
        super().__init__()
        sizes = map_sizes(image_size)
        layers: list[nn.Module] = []
        before = in_channels
        for level in range(len(sizes) - 1):
            after = width * 2**level
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after)]
            layers.append(nn.ReLU())
            before = after
        self.convolutions = ImageLayers(in_channels, layers)
        self.linear = nn.Linear(before * sizes[-1] ** 2, outputs)

    def forward(self, images: Tensor) -> Tensor:
        codes: Tensor = self.linear(self.convolutions(images).flatten(1))
        return codes


class ConvolutionalDecoder(nn.Module):
    """A linear map, 4×4 transposed convolutions with batch norm and ReLU, and a convolution."""

    def __init__(self, latent_dim: int, image_channels: int, image_size: int, width: int) -> None:
        super().__init__()
        sizes = map_sizes(image_size)
        before = width * 2 ** (len(sizes) - 2)
        self.shape = (before, sizes[-1], sizes[-1])
        self.linear = nn.Linear(latent_dim, before * sizes[-1] ** 2)
        layers: list[nn.Module] = [nn.BatchNorm2d(before), nn.ReLU()]
        for _ in range(len(sizes) - 1):
            after = max(width, before // 2)
            layers.append(nn.ConvTranspose2d(before, after, 4, stride=2, padding=1))
            layers += [nn.BatchNorm2d(after), nn.ReLU()]
            before = after
        self.convolutions = nn.Sequential(*layers)
        self.draw = nn.Conv2d(before, image_channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        maps = self.linear(latents).reshape(len(latents), *self.shape)
        return torch.sigmoid(self.draw(self.convolutions(maps)))


def convolutional_autoencoder(
    *,
    in_channels: int = 1,
    image_size: int = 28,
    latent_dim: int = 32,
    width: int = 32,
    variational: bool = False,
) -> Autoencoder:
    """Build a convolutional AE, RAE or VAE with the layout of RAE.

    AE and RAE differ in their training only (Ghosh et al., "From variational to deterministic
    autoencoders", ICLR 2020).

    Args:
        in_channels: Channels of the images.
        image_size: Side of the images.
        latent_dim: Length of a latent vector.
        width: Channels of the first layer (128 in the paper).
        variational: Whether to build a VAE.

    Examples:
        >>> from equilibria.models.generators.autoencoders import convolutional_autoencoder
        >>> model = convolutional_autoencoder(image_size=8, width=4, variational=True)
        >>> mean, log_variance = model.posterior(torch.rand(2, 1, 8, 8))
        >>> mean.shape == log_variance.shape == (2, 32)
        True
    """
    check_at_least_one(latent_dim=latent_dim, width=width)
    outputs = 2 * latent_dim if variational else latent_dim
    return Autoencoder(
        encoder=ConvolutionalEncoder(in_channels, image_size, width, outputs),
        decoder=ConvolutionalDecoder(latent_dim, in_channels, image_size, width),
        latent_dim=latent_dim,
        variational=variational,
    )


def mdeq_autoencoder(
    *,
    in_channels: int = 1,
    image_size: int = 28,
    latent_dim: int = 32,
    channels: int | Sequence[int] = (8, 16),
    expansion: int = 2,
    downsample: int = 2,
    encoder_head: int = 4,
    final_channels: int = 64,
    head_channels: int = 32,
    groups: int = 8,
    variational: bool = True,
    solving: Solving | None = None,
) -> Autoencoder:
    """Build an MDEQ-VAE or MDEQ-AE: an MDEQ as encoder and an MDEQ decoder (JIIO, Appendix C.2).

    All norms are group norms, so that JIIO can run on the trained decoder.

    Args:
        in_channels: Channels of the images.
        image_size: Side of the images.
        latent_dim: Length of a latent vector.
        channels: Channels of each branch, the finest first.
        expansion: Ratio of the inner width of a residual block to its channels.
        downsample: Factor between the sides of the images and of the finest map: 1, 2 or 4.
        encoder_head: Width of the encoder head's first bottleneck.
        final_channels: Channels of the encoder's pooled feature.
        head_channels: Channels of the decoder's head.
        groups: Groups of the norms.
        variational: Whether to build a VAE.
        solving: How the layers solve.

    Examples:
        >>> from equilibria.models.generators.autoencoders import mdeq_autoencoder
        >>> model = mdeq_autoencoder(image_size=8, latent_dim=3, channels=(4, 8))
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 1, 8, 8])
    """
    check_at_least_one(latent_dim=latent_dim)
    shared: dict[str, Any] = {
        "in_channels": in_channels,
        "channels": channels,
        "expansion": expansion,
        "downsample": downsample,
        "groups": groups,
        "solving": solving,
    }
    encoder = mdeq(
        num_classes=2 * latent_dim if variational else latent_dim,
        head_channels=encoder_head,
        final_channels=final_channels,
        **shared,
    )
    decoder = mdeq_decoder(
        image_size=image_size, latent_dim=latent_dim, head_channels=head_channels, **shared
    )
    return Autoencoder(encoder, decoder, latent_dim=latent_dim, variational=variational)


def map_sizes(image_size: int) -> list[int]:
    """Return the sides of the maps from the image down, halved while even and larger than 4."""
    if image_size < 2 * SMALLEST_MAP or image_size % 2:
        raise ValueError(
            f"image_size must be even and at least {2 * SMALLEST_MAP}, got {image_size}; pad or "
            "resize the images"
        )
    sizes = [image_size]
    while sizes[-1] % 2 == 0 and sizes[-1] > SMALLEST_MAP:
        sizes.append(sizes[-1] // 2)
    return sizes
