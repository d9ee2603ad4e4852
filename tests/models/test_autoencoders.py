"""Autoencoders, convolutional and MDEQ's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.models.generators.autoencoders import Autoencoder
from equilibria.models.generators.decoders import EquilibriumDecoder

NAMES = ("vae-conv", "ae-conv", "mdeq-vae", "mdeq-ae")
SMALL: dict[str, Any] = {"conv": {"width": 4}, "mdeq": {"channels": (4, 8), "tolerance": 1e-4}}


def small_autoencoder(name: str, **options: Any) -> Autoencoder:
    torch.manual_seed(0)
    shrunk = next(value for key, value in SMALL.items() if key in name)
    model = eq.create_model(name, **{"latent_dim": 6, "image_size": 16, **shrunk, **options})
    assert isinstance(model, Autoencoder)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "channels"), [(16, 3), (28, 1), (32, 3), (64, 1)])
def test_encodes_and_draws_images(name: str, size: int, channels: int) -> None:
    model = small_autoencoder(name, image_size=size, in_channels=channels).eval()
    images = torch.rand(2, channels, size, size)
    with torch.no_grad():
        latents = model.encode(images)
        assert latents.shape == (2, model.latent_dim) == (2, 6)
        torch.testing.assert_close(model(images), model.decode(latents))
    assert model(images).shape == images.shape


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name: str) -> None:
    model = small_autoencoder(name)
    images = torch.rand(4, 1, 16, 16)
    mean, log_variance = model.posterior(images)
    spread = (log_variance / 2).exp() * torch.randn_like(mean)
    (model.decode(mean + spread) - images).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_only_a_variational_model_has_a_spread(name: str) -> None:
    model = small_autoencoder(name).eval()
    assert model.variational == name.endswith(("vae", "vae-conv"))
    _, log_variance = model.posterior(torch.rand(2, 1, 16, 16))
    assert bool((log_variance.exp() > 0).all()) == model.variational


def test_mdeq_autoencoders_have_an_equilibrium_decoder() -> None:
    model = small_autoencoder("mdeq-vae").eval()
    assert isinstance(model.decoder, EquilibriumDecoder)
    model(torch.rand(2, 1, 16, 16))
    assert model.last_solution is model.decoder.last_solution is not None
    assert small_autoencoder("ae-conv").last_solution is None


def test_odd_images_are_refused() -> None:
    with pytest.raises(ValueError, match="even side of at least 8"):
        small_autoencoder("ae-conv", image_size=27)
