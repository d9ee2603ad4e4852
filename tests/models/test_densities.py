"""Densities of latents: samples, likelihoods and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from equilibria.models.generators.densities import fit_density

OPTIONS: dict[str, dict[str, Any]] = {
    "gmm": {},
    "vae-gmm": {"hidden": 64, "codes": 8, "steps": 500},
}
CENTERS = torch.tensor([[5.0, 0.0, 0.0], [0.0, -5.0, 0.0]])


def two_clusters(count: int = 600) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(2, (count,), generator=generator)
    return CENTERS[which] + 0.3 * torch.randn(count, 3, generator=generator)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_samples_are_near_the_latents(name: str) -> None:
    density = fit_density(name, two_clusters(), components=4, **OPTIONS[name])
    samples = density.sample(300)
    assert samples.shape == (300, 3)
    assert samples.dtype == torch.float32
    nearest = torch.cdist(samples, CENTERS).min(dim=1)
    assert nearest.values.median() < 1.0
    share = nearest.indices.float().mean()
    assert 0.35 < share < 0.65


@pytest.mark.parametrize("name", list(OPTIONS))
def test_likelihood_is_higher_for_latents_than_for_others(name: str) -> None:
    latents = two_clusters()
    density = fit_density(name, latents, components=4, **OPTIONS[name])
    assert density.log_likelihood(latents).mean() > density.log_likelihood(latents + 3).mean() + 5


def test_likelihood_of_one_gaussian_is_exact() -> None:
    latents = 3 * torch.randn(5000, 2, dtype=torch.float64)
    density = fit_density("gmm", latents, components=1)
    exact = torch.distributions.MultivariateNormal(latents.mean(dim=0), latents.T.cov())
    torch.testing.assert_close(
        density.log_likelihood(latents[:5]), exact.log_prob(latents[:5]), rtol=0, atol=5e-3
    )


@pytest.mark.parametrize("name", list(OPTIONS))
def test_samples_are_deterministic_for_a_seed(name: str) -> None:
    latents = two_clusters(200)
    state = torch.random.get_rng_state()
    first, second = (
        fit_density(name, latents, components=2, seed=3, **OPTIONS[name]) for _ in range(2)
    )
    torch.testing.assert_close(first.sample(5, seed=1), second.sample(5, seed=1))
    assert not torch.equal(first.sample(5, seed=1), first.sample(5, seed=2))
    assert torch.equal(state, torch.random.get_rng_state())


def test_components_are_limited_by_the_number_of_latents() -> None:
    assert fit_density("gmm", torch.randn(5, 2), components=20).sample(3).shape == (3, 2)


def test_invalid_densities_and_latents_raise() -> None:
    with pytest.raises(ValueError, match="density must be one of gmm, vae-gmm"):
        fit_density("kde", torch.randn(10, 2))
    with pytest.raises(ValueError, match="NaN or infinite"):
        fit_density("gmm", torch.full((10, 2), torch.nan))
    with pytest.raises(ValueError, match="N of at least 2"):
        fit_density("gmm", torch.randn(1, 2))


def test_likelihood_of_a_mixture_against_torch_distributions() -> None:
    latents = 7 * two_clusters(300).double() + 2
    density = fit_density("gmm", latents, components=3, ridge=0.05)
    mixture, shift, unit = density.mixture, density.mean, density.spread  # type: ignore[attr-defined]
    parts = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.as_tensor(mixture.weights_)),
        torch.distributions.MultivariateNormal(
            torch.as_tensor(mixture.means_ * unit + shift),
            torch.as_tensor(mixture.covariances_ * unit**2),
        ),
    )
    points = latents[:6].clone().requires_grad_()
    likelihood = density.log_likelihood(points)
    torch.testing.assert_close(likelihood, parts.log_prob(points))
    (slope,) = torch.autograd.grad(likelihood.sum(), points)
    (exact,) = torch.autograd.grad(parts.log_prob(points).sum(), points)
    torch.testing.assert_close(slope, exact)


def test_temperature_scales_samples_and_not_the_likelihood() -> None:
    """Deviations from the mean scale with the root of the temperature."""
    latents = two_clusters().double()
    plain, cold = (fit_density("gmm", latents, components=1, temperature=t) for t in (1.0, 0.25))
    mean = latents.mean(dim=0)
    torch.testing.assert_close(cold.sample(50) - mean, (plain.sample(50) - mean) / 2)
    torch.testing.assert_close(cold.log_likelihood(latents), plain.log_likelihood(latents))
    with pytest.raises(ValueError, match="temperature must be positive"):
        fit_density("gmm", latents, temperature=0.0)


def test_ridge_widens_components() -> None:
    latents = two_clusters().double()
    narrow, wide = (fit_density("gmm", latents, components=2, ridge=r) for r in (1e-4, 0.5))
    far = latents + 1.0
    assert wide.log_likelihood(far).mean() > narrow.log_likelihood(far).mean()
    with pytest.raises(ValueError, match="ridge must be positive"):
        fit_density("gmm", latents, ridge=0.0)
