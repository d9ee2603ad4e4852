"""Numbers outside their range raise errors, with a suggestion if a unit was confused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.exports.graph import Loop
from equilibria.inputs import AttackSettings
from equilibria.inputs.latents import LatentSearch
from equilibria.models.restorers.photo import photo_denoiser
from equilibria.operators import Blur, Identity
from equilibria.restoration import Denoising, PhotoMinimizer, PhotoRestorer, RestorationProblem

GRAY = r"must be in .* \(a fraction of the pixel range\), got 25\. Did you mean 25/255 = 0\.098\?"
PICTURE = torch.full((1, 1, 24, 24), 0.5)


@cache
def prior() -> eq.energies.OpponentPrior:
    return eq.models.photo_prior()


GRAY_LEVELS: dict[str, Callable[[], Any]] = {
    "denoising": lambda: Denoising(noise=25),
    "deblurring": lambda: eq.restoration.Deblurring(noise=25),
    "superres": lambda: eq.restoration.get_damage("superres", noise=25),
    "restorer": lambda: PhotoMinimizer(prior(), noise=25),
    "restorer with a level": lambda: PhotoMinimizer(prior(), noise=25, level=0.1).restore(PICTURE),
    "level": lambda: PhotoMinimizer(prior(), noise=0.1, level=25),
    "accuracy": lambda: PhotoMinimizer(prior(), noise=0.1, accuracy=25),
    "settings": lambda: PhotoRestorer(level=25),
    "picture": lambda: PhotoRestorer(prior()).restore(RestorationProblem(PICTURE, Identity(), 25)),
    "blurred": lambda: PhotoRestorer(prior(), strength=1).restore(
        RestorationProblem(PICTURE, Blur(1.5), 25)
    ),
    "scattering": lambda: eq.restoration.Scattering(noise=25),
    "denoiser": lambda: photo_denoiser(noise=25),
    "augmentation": lambda: eq.data.GaussianNoise(25),
    "photo prior task": lambda: eq.tasks.PhotoPriorTask(judged=25),
    "attack": lambda: AttackSettings(eps=25, norm="linf"),
    "adversarial": lambda: eq.tasks.AdversarialClassification(eps=25, norm="linf"),
}


@pytest.mark.parametrize("name", GRAY_LEVELS)
def test_gray_levels_raise_and_the_fraction_is_suggested(name: str) -> None:
    with pytest.raises(ValueError, match=GRAY):
        GRAY_LEVELS[name]()


def test_a_noise_of_one_and_custom_units_of_a_measurement_are_valid() -> None:
    assert Denoising(noise=1).noise == 1
    assert eq.restoration.Measured(lambda y: 255 * y, noise=25).noise == 25
    restorer = PhotoMinimizer(prior(), noise=25, level=0.1)
    restored = restorer.restore(255 * PICTURE, lambda y: 255 * y, start=PICTURE)
    assert (restored.images - PICTURE).abs().max() < 0.01


TOLERANCES: dict[str, Callable[[float], Any]] = {
    "solver": lambda tolerance: eq.Anderson(tolerance=tolerance),
    "layer": lambda tolerance: eq.EquilibriumLayer(eq.Input(torch.eye(2)), tolerance=tolerance),
    "model": lambda tolerance: eq.create_model("opteq-small", tolerance=tolerance),
    "gradient": lambda tolerance: eq.Implicit(tolerance=tolerance),
    "criterion": lambda tolerance: eq.solvers.RelativeResidual(tolerance),
    "export": lambda tolerance: eq.export(
        "digits-opteq", "missing/never.onnx", tolerance=tolerance
    ),
    "loop": lambda tolerance: Loop(tolerance=tolerance),
    "training": lambda tolerance: eq.training.TrainingSettings(epochs=1, tolerance=tolerance),
    "latents": lambda tolerance: LatentSearch(tolerance=tolerance),
    "few-shot": lambda tolerance: eq.tasks.FewShot(tolerance=tolerance),
    "reconstruction": lambda tolerance: eq.tasks.Reconstruction(check_tolerance=tolerance),
    "attack": lambda tolerance: AttackSettings(eps=1.0, tolerance=tolerance),
}


@pytest.mark.parametrize("name", TOLERANCES)
def test_a_tolerance_of_one_or_more_raises(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be in \(0, 1\) \(a relative residual\), got 5$"):
        TOLERANCES[name](5.0)


def test_an_exponent_as_a_tolerance_suggests_the_power_of_ten() -> None:
    with pytest.raises(ValueError, match=r"got -4\. Did you mean 1e-4\?"):
        eq.Anderson(tolerance=-4)


def test_a_percentage_as_a_share_suggests_the_fraction() -> None:
    with pytest.raises(ValueError, match=r"got 10\. Did you mean 10% = 0\.1\?"):
        eq.tasks.Classification(label_smoothing=10)


@pytest.mark.parametrize("method", ["pgd", "fgsm"])
def test_an_l2_radius_larger_than_the_pixel_range_raises(method: str) -> None:
    model, digits = eq.load("digits-opteq"), eq.data.load_digits().test
    batch = digits.images[:2], digits.labels[:2]
    message = r"eps must be at most 8, .* shape 1×8×8, got 25\. Did you mean 25/255 = 0\.098\?"
    with pytest.raises(ValueError, match=message):
        eq.attack(model, *batch, eps=25.0, method=method)
    with pytest.raises(ValueError, match=message):
        eq.inputs.measure_robustness(model, *batch, AttackSettings(eps=25.0), methods=[method])
    assert eq.attack(model, *batch, eps=8.0, steps=1).images.shape == batch[0].shape


def nan() -> float:
    return float("nan")


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "blur": (lambda: eq.restoration.Deblurring(width=-1), "width must be positive"),
    "share": (
        lambda: eq.restoration.Scattering(share=70),
        r"share must be in \(0, 1\), got 70\. Did you mean 70% = 0\.7\?",
    ),
    "factor": (
        lambda: eq.restoration.SuperResolution(factor=1),
        "factor must be at least 2, got 1",
    ),
    "large factor": (
        lambda: eq.restoration.SuperResolution(factor=100_000),
        "factor must be at most 16, got 100000",
    ),
    "noise NaN": (lambda: Denoising(noise=nan()), "noise must be in"),
    "noise below zero": (
        lambda: RestorationProblem(PICTURE, Identity(), -1),
        "noise must not be negative",
    ),
    "strength": (
        lambda: PhotoRestorer(prior(), strength=100).restore(
            RestorationProblem(PICTURE, Identity(), 0.1)
        ),
        "strength must be at most 10, .* got 100",
    ),
    "patience": (lambda: eq.Anderson(patience=0), "patience must be at least 1"),
    "restart growth": (lambda: eq.Broyden(restart_growth=nan()), "restart_growth must be above 1"),
    "cap": (lambda: eq.solvers.AndersonTypeOne(cap=nan()), "cap must be positive"),
    "linear solver": (
        lambda: eq.solvers.gmres(lambda u: u, torch.ones(1, 2), tolerance=-1, max_iterations=5),
        "tolerance must be in",
    ),
    "radius": (lambda: eq.tasks.CertifiedClassification(radius=nan()), "radius must be positive"),
    "step size": (lambda: eq.tasks.FewShot(step_size=-1), "step_size must be positive"),
    "shift": (lambda: eq.data.RandomShift(pixels=-1), "pixels must not be negative"),
    "loop": (lambda: Loop(max_iterations=0), "max_iterations must be at least 1"),
    "pool": (lambda: eq.create_model("opteq-small", pool=0), "pool must be at least 1"),
    "scale": (
        lambda: eq.create_model("opteq-small", init_scale=-1),
        "init_scale must not be",
    ),
    "gain": (lambda: eq.create_model("mdeq-small", init_gain=nan()), "init_gain must be positive"),
    "width": (lambda: eq.create_model("ae-conv", width=0), "width must be at least 1"),
    "channels": (lambda: eq.create_model("dncnn", channels=0), "channels must be at least 1"),
    "latents": (lambda: eq.create_model("ae-conv", latent_dim=0), "latent_dim must be at least 1"),
    "steps": (lambda: eq.create_model("node-small", max_steps=0), "max_steps must be at least 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_outside_their_range_raise(name: str) -> None:
    call, message = OTHERS[name]
    with pytest.raises(ValueError, match=message):
        call()
