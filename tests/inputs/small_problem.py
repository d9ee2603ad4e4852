"""A small smooth problem in float64, on whose optimum all methods must agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import equilibria as eq

HIDDEN = 6


def smooth_model(seed: int = 0, activation: str = "softplus") -> eq.models.EquilibriumClassifier:
    """Return a dense equilibrium model with 4 inputs and 3 outputs."""
    torch.manual_seed(seed)
    W = 0.5 * torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
    layer = eq.EquilibriumLayer(
        eq.Input(eq.Dense(5, HIDDEN)) + eq.Quadratic(W),
        activation=activation,
        solver=eq.Anderson(tolerance=1e-12, max_iterations=500),
        gradient=eq.Implicit(tolerance=1e-12),
    )
    model = eq.models.EquilibriumClassifier(nn.Linear(4, 5), layer, nn.Linear(HIDDEN, 3)).double()
    return model.requires_grad_()


def inputs(count: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).double()


def squared_distance(count: int = 3, seed: int = 2) -> Callable[[Tensor], Tensor]:
    target = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)).double()
    return lambda outputs: (outputs - target).square().sum(dim=1)


def ridge(x: Tensor) -> Tensor:
    return 0.1 * x.square().sum(dim=1)
