"""Densities fitted to latent vectors after training, to draw new ones from (Appendix C.2)."""

from __future__ import annotations

import warnings
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from equilibria.inputs.generation.latent_vae import LatentVAE, train_latent_vae

DensityName = Literal["gmm", "vae-gmm"]


class Density(Protocol):
    """Something to draw latent vectors from."""

    def sample(self, count: int, *, seed: int = 0) -> Tensor: ...

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """ln p of each vector, where that is known; a bound below it otherwise."""
        ...


class MixtureDensity:
    """A mixture of Gaussians with full covariances."""

    def __init__(self, latents: Tensor, *, components: int = 20, seed: int = 0) -> None:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.mixture import GaussianMixture

        rows = _checked(latents).double().cpu().numpy()
        self.like = latents.new_empty(0)
        # In units of the latents' spread, so that the regularization of covariances suits any.
        self.mean = rows.mean(axis=0)
        self.spread = float(rows.std()) or 1.0
        self.mixture = GaussianMixture(
            n_components=min(components, len(rows)), reg_covar=1e-4, random_state=seed
        )
        with warnings.catch_warnings():
            # A mixture that has not quite converged is as good a density as one that has.
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.mixture.fit((rows - self.mean) / self.spread)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """New vectors; the same ones for the same seed."""
        self.mixture.random_state = seed
        drawn, _ = self.mixture.sample(count)
        order = np.random.default_rng(seed).permutation(count)
        return self.like.new_tensor(drawn[order] * self.spread + self.mean)

    def log_likelihood(self, latents: Tensor) -> Tensor:
        rows = (latents.double().cpu().numpy() - self.mean) / self.spread
        values = self.mixture.score_samples(rows) - rows.shape[1] * np.log(self.spread)
        return torch.as_tensor(values)


class VAEMixtureDensity:
    """A small VAE on the latents, and a mixture of Gaussians on the codes of that VAE.

    The paper's has 4 layers of 2096 units in each half, codes of 384 numbers and 20 components.
    """

    def __init__(
        self,
        latents: Tensor,
        *,
        components: int = 20,
        hidden: int = 256,
        codes: int = 64,
        noise: float = 0.2,
        steps: int = 1000,
        seed: int = 0,
    ) -> None:
        self.vae: LatentVAE = train_latent_vae(
            _checked(latents), hidden=hidden, codes=codes, noise=noise, steps=steps, seed=seed
        )
        drawn = self.vae.draw_codes(latents, seed=seed)
        self.mixture = MixtureDensity(drawn, components=components, seed=seed)

    def sample(self, count: int, *, seed: int = 0) -> Tensor:
        """New vectors; the same ones for the same seed."""
        return self.vae.draw_vectors(self.mixture.sample(count, seed=seed), seed=seed)

    def log_likelihood(self, latents: Tensor) -> Tensor:
        """The evidence lower bound, by one draw of the codes."""
        with torch.no_grad():
            return self.vae.evidence(latents)


def fit_density(name: str, latents: Tensor, **options: Any) -> Density:
    """A density by name, fitted to latent vectors (one row each)."""
    if name == "gmm":
        return MixtureDensity(latents, **options)
    if name == "vae-gmm":
        return VAEMixtureDensity(latents, **options)
    raise ValueError(f"density must be one of {', '.join(get_args(DensityName))}, not {name!r}")


def _checked(latents: Tensor) -> Tensor:
    if latents.dim() != 2 or len(latents) < 2:
        raise ValueError(
            f"a density is fitted to at least two latent vectors, one row each, not to a tensor of "
            f"shape {tuple(latents.shape)}"
        )
    if not bool(torch.isfinite(latents).all()):
        raise ValueError("some latent vectors are NaN or infinite: no density can be fitted")
    return latents.detach()
