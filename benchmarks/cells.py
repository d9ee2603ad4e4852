"""Cells used only by the benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.gradients.capabilities import symmetry_weight


class MDEQLikeCell(eq.Cell):
    """Residual block of MDEQ (Bai et al., 2020) on one scale, without symmetry or bounds:

        z ← GN(ReLU(GN(V ReLU(GN(W z)) + x) + z)),    W: C → 5C, V: 5C → C, both 3×3

    The map need not contract. With the default values it converges.

    Args:
        channels: Channels C of the state.
        scale: Factor of the initial convolution weights.
        gain: Initial gain of the last GroupNorm.
    """

    def __init__(self, channels: int, *, scale: float = 0.5, gain: float = 0.5) -> None:
        super().__init__()
        groups = max(1, channels // 4)
        self.expand = nn.Conv2d(channels, 5 * channels, 3, padding=1, bias=False)
        self.expand_norm = nn.GroupNorm(groups, 5 * channels)
        self.reduce = nn.Conv2d(5 * channels, channels, 3, padding=1, bias=False)
        self.inject_norm = nn.GroupNorm(groups, channels)
        self.output_norm = nn.GroupNorm(groups, channels)
        with torch.no_grad():
            self.expand.weight.mul_(scale)
            self.reduce.weight.mul_(scale)
            self.output_norm.weight.fill_(gain)

    def inject(self, x: Tensor) -> eq.Context:
        return eq.Context(sample={"x": x})

    def initial_state(self, x: Tensor, context: eq.Context) -> Tensor:
        return torch.zeros_like(x)

    def step(self, state: eq.State, context: eq.Context) -> Tensor:
        assert isinstance(state, Tensor)
        hidden = torch.relu(self.expand_norm(self.expand(state)))
        branch = self.inject_norm(self.reduce(hidden) + context["x"])
        return self.output_norm(torch.relu(branch + state))


class ProbedCell(eq.Cell):
    """T(y) + p with a probe p = 0 for each sample: ∂ℓ/∂p is the adjoint u = (I − Jᵀ)⁻¹ ∂ℓ/∂y.

    This reads u from a computed gradient, since no library returns it.
    """

    def __init__(self, cell: eq.Cell, probe: Tensor) -> None:
        super().__init__()
        self.cell = cell
        self.probe = probe
        self.symmetry = cell.symmetry
        self.couples_batch = cell.couples_batch

    def inject(self, x: Tensor) -> eq.Context:
        return eq.Context(sample={"probe": self.probe}, parts={"cell": self.cell.inject(x)})

    def initial_state(self, x: Tensor, context: eq.Context) -> eq.State:
        return self.cell.initial_state(x, context.parts["cell"])

    def step(self, state: eq.State, context: eq.Context) -> eq.State:
        image = self.cell.step(state, context.parts["cell"])
        assert isinstance(image, Tensor)
        return image + context["probe"]

    def symmetry_weight(self, state: eq.State, context: eq.Context) -> eq.State:
        return symmetry_weight(self.cell, state, context.parts["cell"])
