"""Photon counts: statistics, the variance-stabilizing transform, and the quality of restoration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor

from equilibria.operators import Identity
from equilibria.restoration import PhotoRestorer, Poisson, RestorationProblem
from equilibria.restoration.photons import MAX_TABULATED, Anscombe
from equilibria.tasks.image_quality import picture_psnr

DRAWS = 200_000


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def counted(brightness: float, noise: float) -> Tensor:
    images = torch.full((1, 1, 1, DRAWS), brightness, dtype=torch.float64)
    return Poisson(noise).corrupt(images, seeded()).measured


@pytest.mark.parametrize("brightness", [0.0, 0.03, 0.4, 1.0])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_simulated_counts_have_poisson_statistics(brightness: float, noise: float) -> None:
    measured, variance = counted(brightness, noise), brightness * noise**2
    error = 5 * math.sqrt(variance / DRAWS)
    assert abs(float(measured.mean()) - brightness) <= error + 1e-12
    fourth = variance * noise**4 + 3 * variance**2  # the fourth central moment
    error = 5 * math.sqrt((fourth - variance**2) / DRAWS)
    assert abs(float(measured.var()) - variance) <= 1.01 * error + 1e-12
    counts = measured / noise**2
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [5.0, 20.0, 90.0, 150.0, 2000.0])
def test_transformed_noise_is_uniform(count: float) -> None:
    scale = Anscombe(peak=4 * count)
    deviation = float(scale.to(counted(0.25, scale.peak**-0.5)).std())
    assert deviation == pytest.approx(scale.noise, rel=0.05)


@pytest.mark.parametrize("count", [0.0, 0.2, 1.0, 5.0, 30.0, 99.0, 101.0, 400.0])
def test_inverse_maps_mean_transforms_to_brightness(count: float) -> None:
    """The mean is summed over all counts; the algebraic inverse would be biased."""
    scale, peak = Anscombe(peak=500.0), 500.0
    counts = torch.arange(1000, dtype=torch.float64)
    rate = torch.tensor(count, dtype=torch.float64)
    weights = (torch.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).exp()
    mean = (weights * scale.to(counts / peak)).sum()
    assert float(scale.back(mean)) * peak == pytest.approx(count, abs=2e-4)


def test_inverse_is_monotone_and_continuous_at_the_end_of_the_table() -> None:
    scale = Anscombe(peak=500.0)
    brightness = scale.back(torch.linspace(-0.2, 1.2, 20_001, dtype=torch.float64)) * 500
    assert bool((brightness.diff() >= -1e-9).all())
    assert float(brightness[0]) == 0
    near = (brightness[1:] - MAX_TABULATED).abs() < 2
    assert float(brightness.diff()[near].max()) < 0.1


@pytest.mark.parametrize("noise", [0.1, 0.2])
@pytest.mark.parametrize(
    ("name", "top", "left"), [("flower.jpg", 120, 200), ("china.jpg", 60, 300)]
)
def test_transform_improves_on_gaussian_noise_of_the_mean_level(
    name: str, top: int, left: int, noise: float
) -> None:
    pixels = torch.from_numpy(np.array(load_sample_image(name)))[top : top + 96, left : left + 96]
    truth = pixels.permute(2, 0, 1)[None].float() / 255
    problem = Poisson(noise).corrupt(truth, seeded())
    restored = PhotoRestorer().restore(problem)
    plain = PhotoRestorer().restore(RestorationProblem(problem.measured, Identity(), problem.noise))
    measured, gaussian, ours = (
        float(picture_psnr(images, truth))
        for images in (problem.measured, plain.images, restored.images)
    )
    assert ours > gaussian > measured
    assert restored.statement.endswith("on the scale with uniform noise")


def test_noise_of_a_measured_picture_is_required() -> None:
    with pytest.raises(ValueError, match="noise of photon counts must be specified"):
        Poisson().problem_of(torch.rand(1, 1, 16, 16))
    problem = Poisson(0.2).problem_of(torch.rand(1, 1, 16, 16), 0.2)
    assert problem.truth is None
    assert PhotoRestorer().restore(problem).images.shape == (1, 1, 16, 16)
