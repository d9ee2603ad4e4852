"""Densities fitted to latent vectors after training, to draw new ones from (JIIO, Appendix C.2)."""

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
"""Of each half, as in the paper."""


class Density(Protocol):
    """Something to draw latent vectors from."""

    def sample(self, count: int, *, seed: int = 0) -> Tensor: ...

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """Return ln p of each vector or, where unknown, a lower bound. Differentiable."""
        ...


class MixtureDensity:
    """A mixture of Gaussians with full covariances.

    ridge: added to the variances, in units of the latents' spread squared.
    temperature: multiplies the variances of what is drawn, not of the likelihood: below 1 samples
        lie nearer to the means, where most latents are, and differ less.
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
        # In units of the latents' spread, so that the regularization of covariances suits any.
        self.mean = rows.mean(axis=0)
        self.spread = float(rows.std()) or 1.0
        self.mixture = GaussianMixture(
            n_components=min(components, len(rows)), reg_covar=ridge, random_state=seed
        )
        with warnings.catch_warnings():
            # A mixture that has not quite converged is as good a density as one that has.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.mixture.fit((rows - self.mean) / self.spread)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """New vectors; the same ones for the same seed."""
        self.mixture.random_state = seed
        drawn, component = self.mixture.sample(count)
        means = self.mixture.means_[component]
        drawn = means + math.sqrt(self.temperature) * (drawn - means)
        order = np.random.default_rng(seed).permutation(count)
        return self.like.new_tensor(drawn[order] * self.spread + self.mean)

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """Return ln Σ_k w_k N(x; m_k, C_k), with C_k⁻¹ = P_k P_kᵀ."""
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
    """A small VAE on the latents, and a mixture of Gaussians on the codes of that VAE.

    The paper's has 4 layers of 2096 units in each half, codes of 384 numbers and 20 components;
    `train_latent_vae` has the options of the VAE.
    """

    def __init__(self, latents: Tensor, *, components: int = 20, seed: int = 0, **vae: Any) -> None:
        self.vae = train_latent_vae(_checked(latents), seed=seed, **vae)
        drawn = self.vae.draw_codes(latents, seed=seed)
        self.mixture = MixtureDensity(drawn, components=components, seed=seed)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """New vectors; the same ones for the same seed."""
        return self.vae.draw_vectors(self.mixture.sample(count, seed=seed), seed=seed)

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """The evidence lower bound, by one draw of the codes."""
        with torch.no_grad():
            return self.vae.evidence(latents)


DENSITIES: dict[str, Callable[..., Density]] = {
    "gmm": MixtureDensity,
    "vae-gmm": VAEMixtureDensity,
}


def check_density(density: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a density and its options, given as a name or as a mapping with a name."""
    options = {"name": density} if isinstance(density, str) else dict(density)
    name = options.pop("name", None)
    check_choice(DENSITIES, density=name)
    own = inspect.signature(train_latent_vae if name == "vae-gmm" else MixtureDensity).parameters
    for option in options:
        if option not in {"components", *own} - {"latents", "vectors", "seed"}:
            raise ValueError(f"the density {name} has no option {option!r}")
    return str(name), options


def fit_density(density: str | Mapping[str, Any], latents: Tensor, **options: Any) -> Density:
    """A density, by name or with options of its own, fitted to latent vectors (one row each)."""
    name, own = check_density(density)
    return DENSITIES[name](latents, **{**own, **options})


def _checked(latents: Tensor) -> Tensor:
    if latents.dim() != 2 or len(latents) < 2:
        raise ValueError(
            f"a density is fitted to at least two latent vectors, one row each, not to a tensor of "
            f"shape {tuple(latents.shape)}"
        )
    if not bool(torch.isfinite(latents).all()):
        raise ValueError("some latent vectors are NaN or infinite: no density can be fitted")
    return latents.detach()


class LatentVAE(nn.Module):
    """Codes of vectors, and vectors of codes, on vectors brought to mean 0 and spread 1.

    noise: the deviation of a vector given its code, in units of the spread. It weighs the
        reconstruction against the KL term, which the paper leaves open. With the noise of largest
        likelihood most codes say nothing, and what is drawn lies too near the mean.
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
        """A code of each vector, drawn from its posterior."""
        mean, log_variance = self._posterior(vectors)
        return _draw(mean, log_variance, _generator(vectors, seed))

    @torch.no_grad()
    def draw_vectors(self, codes: Tensor, *, seed: int = 0) -> Tensor:
        """A vector of each code, its noise included."""
        mean: Tensor = self.decoder(codes)
        noise = torch.empty_like(mean).normal_(generator=_generator(codes, seed))
        return (mean + self.noise * noise) * self.spread + self.mean

    def evidence(self, vectors: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A draw of the evidence lower bound of each vector, in nats."""
        mean, log_variance = self._posterior(vectors)
        drawn: Tensor = self.decoder(_draw(mean, log_variance, generator))
        error = (drawn - (vectors - self.mean) / self.spread).square().sum(dim=1)
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
    """A VAE fitted to vectors, one row each. The same seed gives the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = LatentVAE(vectors, hidden=hidden, codes=codes, noise=noise).to(vectors.device)
    order = torch.Generator().manual_seed(seed)
    chance = _generator(vectors, seed)
    batch = min(batch, len(vectors))
    optimizer = torch.optim.Adam(vae.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            indices = torch.randint(len(vectors), (batch,), generator=order)
            loss = -vae.evidence(vectors[indices.to(vectors.device)], chance).mean()
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
