"""What is solved: a cell and an input, the same for every contestant.

Norms are set exactly (to the accuracy of power iteration), without norm control, so that a problem
is as hard as its name says and no time goes into what is not measured.
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
"""For everyone: enough that whoever converges at all reaches the tolerance."""


@dataclass(frozen=True)
class Problem:
    """Find y = T(y; x) for every sample of `x`, with T the step of `cell`."""

    name: str
    cell: eq.Cell
    x: Tensor
    by_hand: Callable[[Tensor, Tensor], Tensor] | None = None
    """T(y; x) written out in PyTorch's operations: what nothing can be faster than."""

    @property
    def is_image(self) -> bool:
        return self.x.dim() == 4

    @cached_property
    def solution(self) -> Tensor:
        """y* to a residual of 1e-6, where the numbers allow it: a start, and a scale."""
        solver = eq.Anderson(tolerance=1e-6, max_iterations=MAX_ITERATIONS)
        layer = eq.EquilibriumLayer(cell=self.cell, solver=solver).train()
        state = layer.solve(self.x).state
        assert isinstance(state, Tensor)
        return state

    @cached_property
    def scales(self) -> tuple[float, float]:
        """The largest and the smallest ‖y*‖ of a sample."""
        norms = self.solution.flatten(1).norm(dim=1)
        return float(norms.max()), float(norms.min())

    @property
    def nonzero_share(self) -> float:
        """The share of units of y* that are not zero: after a ReLU, of those that it let pass."""
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
    """The conv problem with one hard sample; in the others most ReLUs are off, and T is flat."""
    problem = conv(channels=channels, size=size, batch=batch, norm=norm, seed=seed)
    x = 0.5 * problem.x - 0.75
    x[batch // 2] = _mostly_active(problem.x[batch // 2])
    return Problem("mixed batch", problem.cell, x)


def deep(*, channels: int, size: int, batch: int, norm: float, seed: int = 0) -> Problem:
    """Deep OptEq of two convolutional layers in z-space: its Jacobian is not symmetric."""
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
    """The operator, its kernel scaled so that its norm on samples of this shape is `norm`."""
    operator.kernel.mul_(norm / operator.norm_estimate(shape, iterations=300))
    return operator


def _opteq(W: eq.LinearOperator) -> eq.Cell:
    return eq.EnergyCell(eq.Input(eq.operators.Identity()) + eq.Quadratic(W))


def _mostly_active(x: Tensor) -> Tensor:
    """A positive bias and less noise: few ReLUs cut, and T contracts as slowly as ‖W‖² says."""
    return 1 + 0.5 * x
