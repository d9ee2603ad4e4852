"""Decoder-only generators: latents by JIIO, densities to sample them from, and their quality."""

from equilibria.generative.densities import (
    Density,
    MixtureDensity,
    VAEMixtureDensity,
    fit_density,
)
from equilibria.generative.feature_network import FeatureNetwork, train_feature_network
from equilibria.generative.frechet import frechet_distance, gaussian_distance
from equilibria.generative.latent_vae import LatentVAE, train_latent_vae
from equilibria.generative.latents import (
    decode,
    decoder_of,
    find_latents,
    squared_error,
    squared_error_to,
)
from equilibria.generative.quality import psnr
from equilibria.generative.sheets import in_rows, sheet_png

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
    "in_rows",
    "psnr",
    "sheet_png",
    "squared_error",
    "squared_error_to",
    "train_feature_network",
    "train_latent_vae",
]
