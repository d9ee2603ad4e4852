"""MDEQ-VAE and MDEQ-AE: an MDEQ encoder before an MDEQ decoder (JIIO, Appendix C.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equilibria.gradients import GradientRule
from equilibria.models.autoencoders import Autoencoder
from equilibria.models.decoder import mdeq_decoder
from equilibria.models.mdeq import mdeq
from equilibria.solvers import Solver


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
    solver: str | Solver[Any] = "auto",
    gradient: str | GradientRule = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool = False,
) -> Autoencoder:
    """An MDEQ classification network as encoder, and an `mdeq_decoder`.

    All norms are group norms, so that JIIO can be run on the decoder of a trained one.
    """
    shared: dict[str, Any] = {
        "in_channels": in_channels,
        "channels": channels,
        "expansion": expansion,
        "downsample": downsample,
        "groups": groups,
        "solver": solver,
        "gradient": gradient,
        "tolerance": tolerance,
        "max_iterations": max_iterations,
        "strict": strict,
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
