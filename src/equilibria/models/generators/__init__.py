"""Generators of JIIO (Gurumurthy et al., NeurIPS 2021): decoders, autoencoders, named models."""

from equilibria.models.generators.autoencoders import convolutional_autoencoder, mdeq_autoencoder
from equilibria.models.generators.decoders import mdeq_decoder, opteq_decoder
from equilibria.models.registry import register_presets

register_presets(__name__, mdeq_decoder, opteq_decoder, mdeq_autoencoder, convolutional_autoencoder)
