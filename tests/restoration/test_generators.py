"""Restoring with a generator: the latents that explain a measurement, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equilibria.inputs import Prior, optimal_value
from equilibria.inputs.latents import LatentSearch, generator_of, misfit
from equilibria.operators import Blur, Mask
from equilibria.restoration import (
    Damage,
    Deblurring,
    Denoising,
    Inpainting,
    Measured,
    SuperResolution,
    restore,
)
from equilibria.solvers import Status
from tests.inputs.small_generator import SIDE, ExplicitDecoder, chance, decoder, latents

TIGHT: dict[str, Any] = {"iterations": 100, "tolerance": 1e-6}


@pytest.mark.parametrize(
    "corruption",
    [
        Inpainting(window=0.4),
        Deblurring(width=0.8, noise=0),
        SuperResolution(2),
        Measured(lambda x: x[:, :, ::2] ** 3 + x[:, :, ::2]),
    ],
    ids=["inpaint", "deblur", "superres", "own"],
)
def test_an_image_of_the_generator_is_found_from_part_of_it(corruption: Damage) -> None:
    generator = decoder()
    clean = generator(latents()).detach()
    seen = corruption.corrupt(clean, chance())
    found = restore(generator, seen.measured, seen.measurement, iterations=100)
    assert float((found.images - clean).abs().max()) < 1e-2
    true = misfit(generator(found.latents), seen.measured, seen.measurement).detach()
    torch.testing.assert_close(found.misfit, true, rtol=1e-4, atol=1e-8)
    assert "of 3 images converged (secant)" in found.summary()
    assert len(found.messages) == 3


def test_noise_leaves_a_stationary_latent() -> None:
    generator = decoder()
    seen = Denoising(noise=0.1).corrupt(generator(latents()).detach(), chance())
    found = restore(generator, seen.measured, seen.measurement, ridge=0.01, **TIGHT)
    assert bool(found.converged.all()), found.summary()
    leaf = found.latents.clone().requires_grad_()
    loss = misfit(generator(leaf), seen.measured, seen.measurement).sum()
    (gradient,) = torch.autograd.grad(loss + 0.01 * leaf.square().sum(), leaf)
    assert float(gradient.norm(dim=1).max()) < 1e-3
    plain = restore(generator, seen.measured, seen.measurement, **TIGHT)
    assert bool((found.latents.norm(dim=1) < plain.latents.norm(dim=1)).all())
    assert bool((found.misfit >= plain.misfit - 1e-9).all())


def test_the_search_ends_where_noise_explains_the_rest() -> None:
    generator = decoder()
    clean = generator(latents(8)).detach()
    seen = Denoising(noise=0.1).corrupt(clean, chance())
    explained = 0.1**2 * SIDE**2
    found = restore(generator, seen.measured, seen.measurement, noise=0.11, **TIGHT)
    reached = found.misfit <= 1.21 * explained
    assert float(reached.double().mean()) >= 0.5
    assert bool(found.converged[reached].all())
    row = int(reached.int().argmax())
    assert "reached the noise level 0.11" in found.messages[row]
    fitted = restore(generator, seen.measured, seen.measurement, **TIGHT)
    assert bool((fitted.misfit <= found.misfit + 1e-6).all())


def test_hidden_pixels_count_for_nothing() -> None:
    generator = decoder()
    clean = generator(latents()).detach()
    seen = Inpainting(window=0.4).corrupt(clean, chance())
    assert isinstance(seen.measurement, Mask)
    one = restore(generator, seen.measured, seen.measurement, iterations=10)
    rubbish = seen.measured + 50 * (1 - seen.measurement.known)
    other = restore(generator, rubbish, seen.measurement, iterations=10)
    assert torch.equal(one.images, other.images)


def test_the_best_of_several_starts_counts() -> None:
    generator = decoder()
    seen = Denoising(noise=0.1).corrupt(generator(3 * latents()).detach(), chance())
    alone = restore(generator, seen.measured, seen.measurement, iterations=4)
    several = restore(generator, seen.measured, seen.measurement, iterations=4, starts=4)
    assert bool((several.misfit <= alone.misfit).all())
    assert bool((several.misfit < alone.misfit).any())
    assert several.evaluations > 3 * alone.evaluations
    for row in range(3):
        image = generator(several.latents[row : row + 1]).detach()
        torch.testing.assert_close(image[0], several.images[row], rtol=1e-4, atol=1e-6)


def test_a_generator_without_an_equilibrium_is_searched_by_adam() -> None:
    model = ExplicitDecoder().double()
    clean = model.decode(latents()).detach()
    found = restore(model, Blur(0.7)(clean), Blur(0.7), iterations=300)
    assert found.engine == "adam"
    assert float((found.images - clean).abs().max()) < 0.05
    torch.testing.assert_close(found.images, model.decode(found.latents).detach())
    mixed = restore(model, Blur(0.7)(clean), Blur(0.7), engine="anderson", sweeps=3, **TIGHT)
    assert mixed.engine == "anderson"
    assert float((mixed.images - clean).abs().max()) < 1e-3


def test_the_gradient_for_an_explicit_generator_is_exact() -> None:
    model = generator_of(ExplicitDecoder().double())
    clean = torch.rand(3, 1, SIDE, SIDE).double()
    found = LatentSearch(iterations=5).run(model, clean, Blur(0.7), torch.zeros(3, 3).double())
    value = optimal_value(found).sum()
    parameter = next(model.parameters())
    (gradient,) = torch.autograd.grad(value, parameter)
    (exact,) = torch.autograd.grad(misfit(model(found.x), clean, Blur(0.7)).sum(), parameter)
    torch.testing.assert_close(gradient, exact)


def test_generators_are_found_in_models() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder()
            self.latent_dim = 3

    model = Autoencoder()
    assert generator_of(model) is model.decoder
    assert generator_of(model.decoder) is model.decoder
    with pytest.raises(TypeError, match="Linear is no generator of images"):
        generator_of(nn.Linear(3, 3))


def test_a_restoration_leaves_the_generator_as_it_was() -> None:
    generator = decoder().train()
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    restore(generator, torch.zeros(2, 1, SIDE, SIDE).double(), lambda x: x, iterations=2)
    assert generator.training
    after = generator.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"starts": 0}, "starts must be at least 1"),
        ({"ridge": -1.0}, "ridge must not be negative"),
        ({"noise": float("nan")}, "noise must not be negative"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"ridge": float("inf")}, "ridge must not be negative or infinite"),
        ({"spread": float("nan")}, "spread must not be negative"),
        ({"start": torch.zeros(1, 7)}, r"shape \(1, 3\), not \(1, 7\)"),
        ({"start": torch.zeros(2, 3)}, r"shape \(1, 3\), not \(2, 3\)"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        restore(decoder(), torch.zeros(1, 1, SIDE, SIDE).double(), lambda x: x, **options)


def test_a_pixel_that_is_no_number_fails_its_image_alone() -> None:
    generator = decoder()
    measured = generator(latents()).detach()
    clean = restore(generator, measured, lambda x: x, iterations=30)
    measured[1, 0, 0, 0] = torch.nan
    found = restore(generator, measured, lambda x: x, iterations=30)
    assert found.status[1] == Status.DIVERGED
    assert "what the loss is made of" in found.messages[1]
    torch.testing.assert_close(found.latents[[0, 2]], clean.latents[[0, 2]])


def test_a_measurement_of_another_shape_is_refused() -> None:
    def halved(images: Tensor) -> Tensor:
        return images[..., ::2]

    with pytest.raises(ValueError, match="the measured values have shape"):
        restore(decoder(), torch.zeros(1, 1, SIDE, SIDE).double(), halved)


def test_a_normal_prior_is_a_ridge() -> None:
    """−w ln N(x; 0, s²) is w ‖x‖²/2s² but for a constant."""
    generator = decoder()
    seen = Denoising(noise=0.1).corrupt(generator(latents()).detach(), chance())

    def normal(x: Tensor) -> Tensor:
        return -0.5 * (x / 2).square().sum(dim=1)

    prior = Prior(normal, weight=0.2)
    given = restore(generator, seen.measured, seen.measurement, prior=prior, **TIGHT)
    same = restore(generator, seen.measured, seen.measurement, ridge=0.2 / 8, **TIGHT)
    torch.testing.assert_close(given.latents, same.latents, rtol=1e-4, atol=1e-5)
    free = restore(generator, seen.measured, seen.measurement, **TIGHT)
    assert bool((given.misfit > free.misfit).all())
    with pytest.raises(ValueError, match="weight must be positive"):
        Prior(normal, weight=0.0)


def test_a_prior_decides_what_a_window_hides() -> None:
    """Nothing was measured: the most probable latent is the answer."""
    generator, center = decoder(), latents()[:1]
    hidden = Mask(torch.zeros(1, 1, SIDE, SIDE, dtype=torch.bool))
    prior = Prior(lambda x: -(x - center).square().sum(dim=1), weight=1.0)
    found = restore(generator, torch.zeros(1, 1, SIDE, SIDE).double(), hidden, prior=prior, **TIGHT)
    torch.testing.assert_close(found.latents, center, rtol=1e-4, atol=1e-4)
