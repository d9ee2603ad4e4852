"""Densities fitted to the latents of a trained generator, for sampling (JIIO, Appendix C.2)."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from equilibria.registry import check_choice, check_positive

VAE_LAYERS = 4
"""Linear layers of the encoder and of the decoder, as in the paper."""


class Density(Protocol):
    """A probability density of latent vectors."""

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw latent vectors, shape (count, latent_dim)."""
        ...

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """Return the log-density, or a lower bound on it, of each vector, shape (B,).

        It is differentiable.
        """
        ...


class MixtureDensity:
    """Mixture of Gaussians with full covariances.

    Args:
        latents: Latent vectors to fit, shape (N, latent_dim), N ≥ 2.
        components: Largest number of Gaussians.
        ridge: Number added to the variances, relative to the variance of all latents.
        temperature: Factor of the variances in `sample`, not in `log_likelihood`. Below 1, samples
            are nearer to the means and less diverse.
        seed: Random seed of the fit.
    """

    def __init__(
        self,
        latents: Tensor,
        *,
        components: int = 20,
        ridge: float = 1e-4,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        check_positive(ridge=ridge, temperature=temperature)
        self.temperature = temperature
        rows = _checked(latents).double().cpu().numpy()
        self.like = latents.new_empty(0)
        # Standardized, so that `ridge` does not depend on the scale of the latents.
        self.mean = rows.mean(axis=0)
        self.spread = float(rows.std()) or 1.0
        self.mixture = GaussianMixture(
            n_components=min(components, len(rows)), reg_covar=ridge, random_state=seed
        )
        with warnings.catch_warnings():
            # A mixture that has not fully converged is a valid density too.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.mixture.fit((rows - self.mean) / self.spread)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw latent vectors, shape (count, latent_dim); deterministic for a given seed."""
        self.mixture.random_state = seed
        drawn, component = self.mixture.sample(count)
        means = self.mixture.means_[component]
        drawn = means + math.sqrt(self.temperature) * (drawn - means)
        order = np.random.default_rng(seed).permutation(count)
        return self.like.new_tensor(drawn[order] * self.spread + self.mean)

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """Return the log-density of each vector, shape (B,).

        It is ln Σ_k w_k N(x; m_k, C_k) for a vector x, with the weights, means and covariances of
        the mixture.
        """
        mixture, size = self.mixture, latents.shape[1]
        weights, means, roots = (
            torch.as_tensor(part, device=latents.device)
            for part in (mixture.weights_, mixture.means_, mixture.precisions_cholesky_)
        )
        rows = (latents.double() - torch.as_tensor(self.mean, device=latents.device)) / self.spread
        whitened = torch.einsum("bki,kij->bkj", rows[:, None] - means, roots)
        volume = roots.diagonal(dim1=1, dim2=2).log().sum(dim=1) - size * math.log(self.spread)
        exponent = -(whitened.square().sum(dim=2) + size * math.log(2 * math.pi)) / 2
        return torch.logsumexp(weights.log() + volume + exponent, dim=1)


class VAEMixtureDensity:
    """Density of a small VAE on the latents whose codes have a mixture of Gaussians as prior.

    The paper has 4 layers of 2096 units in encoder and decoder, codes of 384 numbers and 20
    components.

    Args:
        latents: Latent vectors to fit, shape (N, latent_dim), N ≥ 2.
        components: Largest number of Gaussians.
        seed: Random seed of the fit.
        vae: Options of `train_latent_vae`.
    """

    def __init__(self, latents: Tensor, *, components: int = 20, seed: int = 0, **vae: Any) -> None:
        self.vae = train_latent_vae(_checked(latents), seed=seed, **vae)
        codes = self.vae.draw_codes(latents, seed=seed)
        self.mixture = MixtureDensity(codes, components=components, seed=seed)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """Draw latent vectors, shape (count, latent_dim); deterministic for a given seed."""
        return self.vae.draw_vectors(self.mixture.sample(count, seed=seed), seed=seed)

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """Return a one-sample estimate of the evidence lower bound per vector, shape (B,)."""
        with torch.no_grad():
            return self.vae.evidence(latents)


DENSITIES: dict[str, Callable[..., Density]] = {
    "gmm": MixtureDensity,
    "vae-gmm": VAEMixtureDensity,
}


def check_density(density: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Validate a density and return its name and options.

    Args:
        density: Name of a density, or a mapping with "name" and its options.

    Raises:
        ValueError: If there is no such density or option.
    """
    options = {"name": density} if isinstance(density, str) else dict(density)
    name = options.pop("name", None)
    check_choice(DENSITIES, density=name)
    target = train_latent_vae if name == "vae-gmm" else MixtureDensity
    valid = {"components", *inspect.signature(target).parameters} - {"latents", "vectors", "seed"}
    for option in options:
        if option not in valid:
            raise ValueError(
                f"density {name!r} has no option {option!r}; it has {', '.join(sorted(valid))}"
            )
    return str(name), options


def fit_density(density: str | Mapping[str, Any], latents: Tensor, **options: Any) -> Density:
    """Fit a density to latent vectors.

    Args:
        density: Name of a density, or a mapping with "name" and its options.
        latents: Latent vectors, shape (N, latent_dim), N ≥ 2.
        options: Further options, which override those of `density`.
    """
    name, specified = check_density(density)
    return DENSITIES[name](latents, **{**specified, **options})


def _checked(latents: Tensor) -> Tensor:
    if latents.dim() != 2 or len(latents) < 2:
        raise ValueError(
            f"latents must have shape (N, latent_dim) with N of at least 2, got "
            f"{tuple(latents.shape)}"
        )
    if not bool(torch.isfinite(latents).all()):
        raise ValueError("latents has NaN or infinite values; remove those vectors first")
    return latents.detach()


class LatentVAE(nn.Module):
    """VAE between vectors, standardized to mean 0 and standard deviation 1, and codes.

    Args:
        vectors: Vectors whose mean and standard deviation are used, shape (N, size).
        hidden: Units of each hidden layer.
        codes: Length of a code.
        noise: Standard deviation of a standardized vector given its code. It weighs the
            reconstruction against the KL term, which the paper leaves open. The noise of maximum
            likelihood makes most codes uninformative, and samples too near to the mean.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, vectors: Tensor, *, hidden: int, codes: int, noise: float) -> None:
        super().__init__()
        check_positive(noise=noise)
        size = vectors.shape[1]
        self.noise = noise
        self.register_buffer("mean", vectors.mean(dim=0))
        self.register_buffer("spread", vectors.std(dim=0).clamp_min(1e-6))
        self.encoder = _perceptron([size, *[hidden] * (VAE_LAYERS - 1), 2 * codes])
        self.decoder = _perceptron([codes, *[hidden] * (VAE_LAYERS - 1), size])

    @torch.no_grad()
    def draw_codes(self, vectors: Tensor, *, seed: int = 0) -> Tensor:
        """Draw a code for each vector from its posterior, shape (B, codes)."""
        mean, log_variance = self._posterior(vectors)
        return _draw(mean, log_variance, _generator(vectors, seed))

    @torch.no_grad()
    def draw_vectors(self, codes: Tensor, *, seed: int = 0) -> Tensor:
        """Draw a vector for each code, including the noise, shape (B, size)."""
        mean: Tensor = self.decoder(codes)
        noise = torch.empty_like(mean).normal_(generator=_generator(codes, seed))
        return (mean + self.noise * noise) * self.spread + self.mean

    def evidence(self, vectors: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a one-sample estimate of the evidence lower bound per vector, in nats."""
        mean, log_variance = self._posterior(vectors)
        reconstructed: Tensor = self.decoder(_draw(mean, log_variance, generator))
        error = (reconstructed - (vectors - self.mean) / self.spread).square().sum(dim=1)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        constant = (math.log(2 * math.pi * self.noise**2) / 2 + self.spread.log()).sum()
        return -(error / (2 * self.noise**2) + divergence + constant)

    def _posterior(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder((vectors - self.mean) / self.spread).chunk(2, dim=1)
        return mean, log_variance.clamp(-15, 15)


def train_latent_vae(
    vectors: Tensor,
    *,
    hidden: int = 256,
    codes: int = 64,
    noise: float = 0.2,
    steps: int = 1000,
    batch: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> LatentVAE:
    """Train a VAE on vectors; deterministic for a given seed.

    Args:
        vectors: Training vectors, shape (N, size).
        hidden: Units of each hidden layer.
        codes: Length of a code.
        noise: Standard deviation of a standardized vector given its code.
        steps: Number of training steps.
        batch: Batch size.
        learning_rate: Initial learning rate of Adam, with a cosine schedule.
        seed: Random seed.

    Returns:
        The VAE in evaluation mode, without gradients.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = LatentVAE(vectors, hidden=hidden, codes=codes, noise=noise).to(vectors.device)
    batch_generator = torch.Generator().manual_seed(seed)
    noise_generator = _generator(vectors, seed)
    batch = min(batch, len(vectors))
    optimizer = torch.optim.Adam(vae.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            indices = torch.randint(len(vectors), (batch,), generator=batch_generator)
            loss = -vae.evidence(vectors[indices.to(vectors.device)], noise_generator).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return vae.eval().requires_grad_(False)


def _generator(like: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def _draw(mean: Tensor, log_variance: Tensor, generator: torch.Generator | None) -> Tensor:
    noise = torch.empty_like(mean).normal_(generator=generator)
    return mean + (log_variance / 2).exp() * noise


def _perceptron(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
