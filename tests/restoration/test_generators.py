"""Restoration with a generator: the latents that fit a measurement, and the reported outcome."""

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
def test_image_of_the_generator_is_recovered_from_a_measurement(corruption: Damage) -> None:
    generator = decoder()
    clean = generator(latents()).detach()
    problem = corruption.corrupt(clean, chance())
    restored = restore(generator, problem.measured, problem.measurement, iterations=100)
    assert float((restored.images - clean).abs().max()) < 1e-2
    true = misfit(generator(restored.latents), problem.measured, problem.measurement).detach()
    torch.testing.assert_close(restored.misfit, true, rtol=1e-4, atol=1e-8)
    assert "of 3 images converged (secant)" in restored.summary()
    assert len(restored.messages) == 3


def test_latents_are_stationary_for_noisy_images() -> None:
    generator = decoder()
    problem = Denoising(noise=0.1).corrupt(generator(latents()).detach(), chance())
    restored = restore(generator, problem.measured, problem.measurement, ridge=0.01, **TIGHT)
    assert bool(restored.converged.all()), restored.summary()
    leaf = restored.latents.clone().requires_grad_()
    loss = misfit(generator(leaf), problem.measured, problem.measurement).sum()
    (gradient,) = torch.autograd.grad(loss + 0.01 * leaf.square().sum(), leaf)
    assert float(gradient.norm(dim=1).max()) < 1e-3
    plain = restore(generator, problem.measured, problem.measurement, **TIGHT)
    assert bool((restored.latents.norm(dim=1) < plain.latents.norm(dim=1)).all())
    assert bool((restored.misfit >= plain.misfit - 1e-9).all())


def test_search_ends_at_the_noise_level() -> None:
    generator = decoder()
    clean = generator(latents(8)).detach()
    problem = Denoising(noise=0.1).corrupt(clean, chance())
    explained = 0.1**2 * SIDE**2
    restored = restore(generator, problem.measured, problem.measurement, noise=0.11, **TIGHT)
    reached = restored.misfit <= 1.21 * explained
    assert float(reached.double().mean()) >= 0.5
    assert bool(restored.converged[reached].all())
    row = int(reached.int().argmax())
    assert "reached the noise level 0.11" in restored.messages[row]
    fitted = restore(generator, problem.measured, problem.measurement, **TIGHT)
    assert bool((fitted.misfit <= restored.misfit + 1e-6).all())


def test_hidden_pixels_do_not_matter() -> None:
    generator = decoder()
    clean = generator(latents()).detach()
    problem = Inpainting(window=0.4).corrupt(clean, chance())
    assert isinstance(problem.measurement, Mask)
    expected = restore(generator, problem.measured, problem.measurement, iterations=10)
    changed = problem.measured + 50 * (1 - problem.measurement.known)
    restored = restore(generator, changed, problem.measurement, iterations=10)
    assert torch.equal(restored.images, expected.images)


def test_result_is_the_best_of_several_starts() -> None:
    generator = decoder()
    problem = Denoising(noise=0.1).corrupt(generator(3 * latents()).detach(), chance())
    single = restore(generator, problem.measured, problem.measurement, iterations=4)
    several = restore(generator, problem.measured, problem.measurement, iterations=4, starts=4)
    assert bool((several.misfit <= single.misfit).all())
    assert bool((several.misfit < single.misfit).any())
    assert several.evaluations > 3 * single.evaluations
    for row in range(3):
        image = generator(several.latents[row : row + 1]).detach()
        torch.testing.assert_close(image[0], several.images[row], rtol=1e-4, atol=1e-6)


def test_explicit_generator_is_searched_by_adam() -> None:
    model = ExplicitDecoder().double()
    clean = model.decode(latents()).detach()
    restored = restore(model, Blur(0.7)(clean), Blur(0.7), iterations=300)
    assert restored.engine == "adam"
    assert float((restored.images - clean).abs().max()) < 0.05
    torch.testing.assert_close(restored.images, model.decode(restored.latents).detach())
    mixed = restore(model, Blur(0.7)(clean), Blur(0.7), engine="anderson", sweeps=3, **TIGHT)
    assert mixed.engine == "anderson"
    assert float((mixed.images - clean).abs().max()) < 1e-3


def test_gradient_of_an_explicit_generator_is_exact() -> None:
    model = generator_of(ExplicitDecoder().double())
    clean = torch.rand(3, 1, SIDE, SIDE).double()
    restored = LatentSearch(iterations=5).run(model, clean, Blur(0.7), torch.zeros(3, 3).double())
    value = optimal_value(restored).sum()
    parameter = next(model.parameters())
    (gradient,) = torch.autograd.grad(value, parameter)
    (exact,) = torch.autograd.grad(misfit(model(restored.x), clean, Blur(0.7)).sum(), parameter)
    torch.testing.assert_close(gradient, exact)


def test_generator_of_returns_the_decoder_of_a_model() -> None:
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


def test_restore_does_not_change_the_generator() -> None:
    generator = decoder().train()
    original = {name: value.clone() for name, value in generator.state_dict().items()}
    restore(generator, torch.zeros(2, 1, SIDE, SIDE).double(), lambda x: x, iterations=2)
    assert generator.training
    current = generator.state_dict()
    assert all(torch.equal(value, current[name]) for name, value in original.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starts": 0}, "starts must be at least 1"),
        ({"ridge": -1.0}, "ridge must not be negative"),
        ({"noise": float("nan")}, "noise must not be negative"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"ridge": float("inf")}, "ridge must not be negative or infinite"),
        ({"spread": float("nan")}, "spread must not be negative"),
        ({"start": torch.zeros(1, 7)}, r"shape \(1, 3\), got \(1, 7\)"),
        ({"start": torch.zeros(2, 3)}, r"shape \(1, 3\), got \(2, 3\)"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        restore(decoder(), torch.zeros(1, 1, SIDE, SIDE).double(), lambda x: x, **options)


def test_nan_pixel_affects_only_its_image() -> None:
    generator = decoder()
    measured = generator(latents()).detach()
    clean = restore(generator, measured, lambda x: x, iterations=30)
    measured[1, 0, 0, 0] = torch.nan
    restored = restore(generator, measured, lambda x: x, iterations=30)
    assert restored.status[1] == Status.DIVERGED
    assert "check x0 and the loss function" in restored.messages[1]
    torch.testing.assert_close(restored.latents[[0, 2]], clean.latents[[0, 2]])


def test_measurement_of_another_shape_is_rejected() -> None:
    def halved(images: Tensor) -> Tensor:
        return images[..., ::2]

    with pytest.raises(ValueError, match="the measured values have shape"):
        restore(decoder(), torch.zeros(1, 1, SIDE, SIDE).double(), halved)


def test_normal_prior_is_equivalent_to_a_ridge() -> None:
    """−w ln N(x; 0, s²) equals w ‖x‖²/2s² up to a constant."""
    generator = decoder()
    problem = Denoising(noise=0.1).corrupt(generator(latents()).detach(), chance())

    def normal(x: Tensor) -> Tensor:
        return -0.5 * (x / 2).square().sum(dim=1)

    prior = Prior(normal, weight=0.2)
    by_prior = restore(generator, problem.measured, problem.measurement, prior=prior, **TIGHT)
    by_ridge = restore(generator, problem.measured, problem.measurement, ridge=0.2 / 8, **TIGHT)
    torch.testing.assert_close(by_prior.latents, by_ridge.latents, rtol=1e-4, atol=1e-5)
    free = restore(generator, problem.measured, problem.measurement, **TIGHT)
    assert bool((by_prior.misfit > free.misfit).all())
    with pytest.raises(ValueError, match="weight must be positive"):
        Prior(normal, weight=0.0)


def test_result_without_measured_pixels_is_the_mode_of_the_prior() -> None:
    generator, center = decoder(), latents()[:1]
    hidden = Mask(torch.zeros(1, 1, SIDE, SIDE, dtype=torch.bool))
    prior = Prior(lambda x: -(x - center).square().sum(dim=1), weight=1.0)
    restored = restore(
        generator, torch.zeros(1, 1, SIDE, SIDE).double(), hidden, prior=prior, **TIGHT
    )
    torch.testing.assert_close(restored.latents, center, rtol=1e-4, atol=1e-4)
