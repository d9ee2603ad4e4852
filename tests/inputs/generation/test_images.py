"""PSNR, feature networks, and the latents of images."""

from __future__ import annotations

import pytest
import torch

from equilibria.data import load_digits
from equilibria.inputs.generation import (
    decode,
    decoder_of,
    find_latents,
    frechet_distance,
    psnr,
    squared_error,
    train_feature_network,
)
from equilibria.models.autoencoders import convolutional_autoencoder
from equilibria.models.decoder import opteq_decoder
from equilibria.models.mdeq_autoencoder import mdeq_autoencoder


def test_psnr_is_that_of_the_formula() -> None:
    images = torch.zeros(2, 1, 4, 4)
    other = images.clone()
    other[0] += 0.1
    assert psnr(other, images).tolist() == [pytest.approx(20, abs=1e-5), float("inf")]
    assert float(psnr(other * 255, images, peak=255)[0]) == pytest.approx(20, abs=1e-5)
    with pytest.raises(ValueError, match="two batches of one shape"):
        psnr(images, images[:1])


def test_features_tell_digits_from_noise() -> None:
    data = load_digits()
    images, labels = data.train.fetch(torch.arange(1200))
    network = train_feature_network(images, labels, num_classes=10, epochs=4)
    held_out, answers = data.test.fetch(torch.arange(len(data.test)))
    accuracy = (network(held_out).argmax(dim=1) == answers).float().mean()
    assert accuracy > 0.85
    rows = network.features(held_out)
    same = frechet_distance(network.features(images[:450]), rows)
    noisy = frechet_distance(network.features((held_out + 0.3).clamp(0, 1)), rows)
    assert same < noisy / 3
    again = train_feature_network(images, labels, num_classes=10, epochs=4)
    torch.testing.assert_close(again.features(held_out), rows)


def test_a_feature_network_needs_classes() -> None:
    with pytest.raises(ValueError, match="at least two labelled classes"):
        train_feature_network(torch.rand(4, 1, 8, 8), torch.zeros(4).long(), num_classes=1)


def test_latents_are_found_and_the_ridge_holds_them_back() -> None:
    decoder = opteq_decoder(
        image_size=16, latent_dim=4, channels=6, width=6, kernel_size=3, head_channels=8
    ).eval()
    images = decode(decoder, torch.randn(4, 4))
    free = find_latents(decoder, images, iterations=30)
    held = find_latents(decoder, images, iterations=30, ridge=1.0)
    assert (free.loss < free.initial_loss).all()
    assert held.x.norm() < 0.5 * free.x.norm()
    again = find_latents(decoder, images, start=free.x, iterations=5)
    assert (again.loss <= free.loss + 1e-6).all()
    errors = squared_error(decode(decoder, free.x), images)
    torch.testing.assert_close(errors, free.loss, rtol=1e-2, atol=1e-4)


def test_only_equilibrium_decoders_are_searched() -> None:
    autoencoder = mdeq_autoencoder(image_size=16, channels=(4, 8))
    assert decoder_of(autoencoder) is autoencoder.decoder
    with pytest.raises(TypeError, match="no EquilibriumDecoder"):
        decoder_of(convolutional_autoencoder(image_size=16, width=4))


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="set in_channels and image_size"):
        squared_error(torch.zeros(2, 1, 16, 16), torch.zeros(2, 3, 16, 16))
