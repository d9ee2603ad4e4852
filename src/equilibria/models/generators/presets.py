"""The named decoders and autoencoders of generative modelling (JIIO, Section 4.1)."""

from __future__ import annotations

from equilibria.models.generators.autoencoders import convolutional_autoencoder, mdeq_autoencoder
from equilibria.models.generators.decoders import mdeq_decoder, opteq_decoder
from equilibria.models.registry import ModelCard, register_models

register_models(
    mdeq_decoder,
    {
        "mdeq-decoder": ModelCard(
            "MDEQ from a latent vector to an image, two resolutions, images of 16×16 to 64×64",
            "JIIO",
        ),
        "mdeq-decoder-64": ModelCard(
            "MDEQ of four resolutions from a latent vector to an image of 64×64 (CelebA)",
            "JIIO T1, T9",
            options=dict(
                in_channels=3,
                image_size=64,
                latent_dim=128,
                channels=(32, 64, 128, 256),
                expansion=5,
                downsample=1,
                head_channels=64,
            ),
        ),
    },
)
register_models(
    opteq_decoder,
    {
        "opteq-decoder": ModelCard(
            "OptEq from a latent vector to an image, images of 16×16 to 64×64", "JIIO"
        ),
    },
)
register_models(
    mdeq_autoencoder,
    {
        "mdeq-vae": ModelCard("VAE with an MDEQ as encoder and an MDEQ as decoder", "JIIO T1"),
        "mdeq-ae": ModelCard(
            "Autoencoder with an MDEQ as encoder and an MDEQ as decoder",
            "JIIO",
            options=dict(variational=False),
        ),
    },
)
register_models(
    convolutional_autoencoder,
    {
        "vae-conv": ModelCard("Convolutional VAE", "JIIO T1", options=dict(variational=True)),
        "ae-conv": ModelCard("Convolutional autoencoder, plain or regularized (RAE)", "JIIO T1"),
    },
)
