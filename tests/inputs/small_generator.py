"""Small generators of 8×8 images in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.context import State

LATENTS, HIDDEN, SIDE = 3, 10, 8


class SmallDecoder(nn.Module):
    """Decoder with a linear stem, a smooth dense equilibrium and a linear head."""

    def __init__(self, *, in_channels: int = 1, image_size: int = SIDE, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = nn.Linear(LATENTS, HIDDEN)
            self.layer = eq.EquilibriumLayer(
                eq.Input(eq.Dense(HIDDEN, HIDDEN))
                + eq.Quadratic(eq.Dense(HIDDEN, HIDDEN, norm="bound", zeta=0.8)),
                activation="softplus",
                solver=eq.Anderson(tolerance=1e-10, max_iterations=500),
                gradient=eq.Implicit(tolerance=1e-10),
            )
            self.head = nn.Sequential(
                nn.Linear(HIDDEN, in_channels * image_size**2),
                nn.Unflatten(1, (in_channels, image_size, image_size)),
            )
        self.latent_dim = LATENTS

    def forward(self, latents: Tensor, start: State | None = None) -> Tensor:
        images: Tensor = self.head(self.layer(self.stem(latents), start))
        return images

    @property
    def last_solution(self) -> eq.Solution | None:
        return self.layer.last_solution


class ExplicitDecoder(nn.Module):
    """Decoder without an equilibrium, with the `decode` method of an autoencoder."""

    latent_dim = LATENTS

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(LATENTS, 20), nn.Tanh(), nn.Linear(20, SIDE**2))

    def decode(self, latents: Tensor) -> Tensor:
        images: Tensor = self.layers(latents).reshape(-1, 1, SIDE, SIDE)
        return images

    def forward(self, images: Tensor) -> Tensor:
        raise AssertionError("only the decoder is a generator")


def decoder() -> SmallDecoder:
    return SmallDecoder().double().eval()


def latents(count: int = 3, seed: int = 5) -> Tensor:
    return torch.randn(count, LATENTS, generator=torch.Generator().manual_seed(seed)).double()


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
