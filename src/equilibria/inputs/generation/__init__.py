"""Decoder-only generators: latents by JIIO, densities to sample them from, and their quality."""

from equilibria.inputs.generation.densities import (
    Density,
    MixtureDensity,
    VAEMixtureDensity,
    fit_density,
)
from equilibria.inputs.generation.feature_network import FeatureNetwork, train_feature_network
from equilibria.inputs.generation.frechet import frechet_distance, gaussian_distance
from equilibria.inputs.generation.latent_vae import LatentVAE, train_latent_vae
from equilibria.inputs.generation.latents import (
    decode,
    decoder_of,
    find_latents,
    squared_error,
    squared_error_to,
)
from equilibria.inputs.generation.quality import psnr

__all__ = [
    "Density",
    "FeatureNetwork",
    "LatentVAE",
    "MixtureDensity",
    "VAEMixtureDensity",
    "decode",
    "decoder_of",
    "find_latents",
    "fit_density",
    "frechet_distance",
    "gaussian_distance",
    "psnr",
    "squared_error",
    "squared_error_to",
    "train_feature_network",
    "train_latent_vae",
]
