"""Search for the latents of images."""

from __future__ import annotations

import pytest
import torch

from equilibria.inputs import decode, find_latents
from equilibria.inputs.latents import generator_of, squared_error
from equilibria.models.generators.autoencoders import convolutional_autoencoder, mdeq_autoencoder
from equilibria.models.generators.decoders import opteq_decoder


def test_search_lowers_the_loss_and_a_ridge_shrinks_the_latents() -> None:
    decoder = opteq_decoder(
        image_size=16, latent_dim=4, channels=6, width=6, kernel_size=3, head_channels=8
    ).eval()
    images = decode(decoder, torch.randn(4, 4))
    free = find_latents(decoder, images, iterations=30)
    penalized = find_latents(decoder, images, iterations=30, ridge=1.0)
    assert (free.loss < free.initial_loss).all()
    assert penalized.x.norm() < 0.5 * free.x.norm()
    again = find_latents(decoder, images, start=free.x, iterations=5)
    assert (again.loss <= free.loss + 1e-6).all()
    errors = squared_error(decode(decoder, free.x), images)
    torch.testing.assert_close(errors, free.loss, rtol=1e-2, atol=1e-4)


def test_explicit_decoder_is_rejected_on_request() -> None:
    autoencoder = mdeq_autoencoder(image_size=16, channels=(4, 8))
    assert generator_of(autoencoder, explicit=False) is autoencoder.decoder
    with pytest.raises(TypeError, match="no EquilibriumDecoder"):
        generator_of(convolutional_autoencoder(image_size=16, width=4), explicit=False)


def test_images_of_another_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="set the model's in_channels and image_size"):
        squared_error(torch.zeros(2, 1, 16, 16), torch.zeros(2, 3, 16, 16))
