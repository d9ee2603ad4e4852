"""The problems: a cell and an input, which are the same for every contestant.

Norms are set exactly (to the accuracy of power iteration) and without norm control, so that the
difficulty is known and only the solve is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

import equilibria as eq
from equilibria.models import DeepOptEqCell, UnitLayer
from equilibria.operators.norm_control import KernelOperator

MAX_ITERATIONS = 2000
"""Limit for all contestants, high enough to reach the tolerance if the method converges."""


@dataclass(frozen=True)
class Problem:
    """Find y = T(y; x) for every sample of `x`, with T the step of `cell`."""

    name: str
    cell: eq.Cell
    x: Tensor
    by_hand: Callable[[Tensor, Tensor], Tensor] | None = None
    """T(y; x) in PyTorch operations, a lower bound on the time of one evaluation."""

    @property
    def is_image(self) -> bool:
        return self.x.dim() == 4

    @cached_property
    def solution(self) -> Tensor:
        """y* to a residual of 1e-6 if the precision allows it."""
        solver = eq.Anderson(tolerance=1e-6, max_iterations=MAX_ITERATIONS)
        layer = eq.EquilibriumLayer(cell=self.cell, solver=solver).train()
        state = layer.solve(self.x).state
        assert isinstance(state, Tensor)
        return state

    @cached_property
    def scales(self) -> tuple[float, float]:
        """The largest and the smallest ‖y*‖ of the samples."""
        norms = self.solution.flatten(1).norm(dim=1)
        return float(norms.max()), float(norms.min())

    @property
    def nonzero_share(self) -> float:
        """Share of nonzero units of y*: after a ReLU, the share of active units."""
        return float((self.solution != 0).float().mean())


def dense(*, width: int, batch: int, norm: float, hard: bool = False, seed: int = 0) -> Problem:
    """y = ReLU(WWᵀy + x) on vectors."""
    torch.manual_seed(seed)
    W = with_norm(eq.Dense(width, width), (width,), norm)
    x = torch.randn(batch, width)

    def by_hand(y: Tensor, x: Tensor) -> Tensor:
        return F.linear(F.linear(y, W.kernel.T), W.kernel).add_(x).relu_()

    name = "hard dense" if hard else "dense"
    return Problem(name, _opteq(W), _mostly_active(x) if hard else x, by_hand)


def conv(
    *, channels: int, size: int, batch: int, norm: float, hard: bool = False, seed: int = 0
) -> Problem:
    """y = ReLU(W ∗ Wᵀ ∗ y + x) on images, W 3×3."""
    torch.manual_seed(seed)
    W = with_norm(eq.Conv2d(channels, channels, 3), (channels, size, size), norm)
    x = torch.randn(batch, channels, size, size)

    def by_hand(y: Tensor, x: Tensor) -> Tensor:
        z = F.conv_transpose2d(y, W.kernel, padding=1)
        return F.conv2d(z, W.kernel, padding=1).add_(x).relu_()

    name = "hard conv" if hard else "conv"
    return Problem(name, _opteq(W), _mostly_active(x) if hard else x, by_hand)


def mixed(*, channels: int, size: int, batch: int, norm: float, seed: int = 0) -> Problem:
    """The conv problem with one hard sample. The others are easy: most ReLUs are inactive."""
    problem = conv(channels=channels, size=size, batch=batch, norm=norm, seed=seed)
    x = 0.5 * problem.x - 0.75
    x[batch // 2] = _mostly_active(problem.x[batch // 2])
    return Problem("mixed batch", problem.cell, x)


def deep(*, channels: int, size: int, batch: int, norm: float, seed: int = 0) -> Problem:
    """Deep OptEq with two convolutional layers in z-space, whose Jacobian is not symmetric."""
    torch.manual_seed(seed)
    layers = []
    for _ in range(2):
        W = with_norm(eq.Conv2d(channels, channels, 3), (channels, size, size), norm)
        bias = torch.ones(channels, 1, 1)
        layers.append(UnitLayer(W, eq.Conv2d(channels, channels, 1), bias=bias, alpha=0.8))
    return Problem("deep", DeepOptEqCell(layers), torch.randn(batch, channels, size, size))


def mdeq(*, channels: int, size: int, batch: int, seed: int = 0) -> Problem:
    """A cell like MDEQ's: two convolutions, three GroupNorms, a residual connection."""
    from benchmarks.cells import MDEQLikeCell

    torch.manual_seed(seed)
    return Problem("mdeq", MDEQLikeCell(channels), torch.randn(batch, channels, size, size))


@torch.no_grad()
def with_norm(operator: KernelOperator, shape: tuple[int, ...], norm: float) -> KernelOperator:
    """Scale the kernel so that the norm of the operator on samples of this shape is `norm`."""
    operator.kernel.mul_(norm / operator.norm_estimate(shape, iterations=300))
    return operator


def _opteq(W: eq.LinearOperator) -> eq.Cell:
    return eq.EnergyCell(eq.Input(eq.operators.Identity()) + eq.Quadratic(W))


def _mostly_active(x: Tensor) -> Tensor:
    """Add a bias and reduce noise: most ReLUs are active, and the contraction rate is near ‖W‖²."""
    return 1 + 0.5 * x
