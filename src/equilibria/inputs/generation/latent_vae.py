"""A small fully connected VAE on latent vectors (Appendix C.2)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

LAYERS = 4
"""Of each half, as in the paper."""


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
        if not noise > 0:
            raise ValueError(f"noise must be positive, not {noise}")
        size = vectors.shape[1]
        self.noise = noise
        self.register_buffer("mean", vectors.mean(dim=0))
        self.register_buffer("spread", vectors.std(dim=0).clamp_min(1e-6))
        self.encoder = _perceptron([size, *[hidden] * (LAYERS - 1), 2 * codes])
        self.decoder = _perceptron([codes, *[hidden] * (LAYERS - 1), size])

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
        error, divergence = self._terms(vectors, generator)
        constant = (math.log(2 * math.pi * self.noise**2) / 2 + self.spread.log()).sum()
        return -(error / (2 * self.noise**2) + divergence + constant)

    def _terms(self, vectors: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        mean, log_variance = self._posterior(vectors)
        drawn = self.decoder(_draw(mean, log_variance, generator))
        error = (drawn - (vectors - self.mean) / self.spread).square().sum(dim=1)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return error, divergence

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
