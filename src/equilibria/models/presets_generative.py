"""The named decoders and autoencoders of generative modelling (JIIO, Section 4.1)."""

from __future__ import annotations

from equilibria.models.autoencoders import convolutional_autoencoder
from equilibria.models.decoder import mdeq_decoder, opteq_decoder
from equilibria.models.mdeq_autoencoder import mdeq_autoencoder
from equilibria.models.registry import register_model

register_model(
    "mdeq-decoder",
    mdeq_decoder,
    summary="MDEQ from a latent vector to an image, two resolutions, images of 16×16 to 64×64",
    paper="JIIO",
)
register_model(
    "opteq-decoder",
    opteq_decoder,
    summary="OptEq from a latent vector to an image, images of 16×16 to 64×64",
    paper="JIIO",
)
register_model(
    "mdeq-decoder-64",
    mdeq_decoder,
    summary="MDEQ of four resolutions from a latent vector to an image of 64×64 (CelebA)",
    paper="JIIO T1, T9",
    in_channels=3,
    image_size=64,
    latent_dim=128,
    channels=(32, 64, 128, 256),
    expansion=5,
    downsample=1,
    head_channels=64,
)
register_model(
    "mdeq-vae",
    mdeq_autoencoder,
    summary="VAE with an MDEQ as encoder and an MDEQ as decoder",
    paper="JIIO T1",
)
register_model(
    "mdeq-ae",
    mdeq_autoencoder,
    summary="Autoencoder with an MDEQ as encoder and an MDEQ as decoder",
    paper="JIIO",
    variational=False,
)
register_model(
    "vae-conv",
    convolutional_autoencoder,
    summary="Convolutional VAE",
    paper="JIIO T1",
    variational=True,
)
register_model(
    "ae-conv",
    convolutional_autoencoder,
    summary="Convolutional autoencoder, plain or regularized (RAE)",
    paper="JIIO T1",
)
