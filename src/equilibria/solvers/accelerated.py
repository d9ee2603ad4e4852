"""Accelerated proximal gradient descent on the hidden objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.solvers.base import Memory, Solver


@dataclass
class Momentum(Memory):
    previous: Tensor
    """T of the point before."""
    time: Tensor
    """Nesterov's t_k of each row; 1 after a restart."""


@dataclass(frozen=True, kw_only=True)
class Accelerated(Solver[Momentum]):
    """Nesterov's method with adaptive restart (O'Donoghue and Candès, 2015, gradient scheme).

    T(y) = prox_f(−∇E(y)) is one proximal gradient step of unit length on the hidden objective, so
    y ← T(y) + (t−1)/t⁺ · (T(y) − T(y_prev)) is its accelerated form; a sample whose momentum points
    uphill restarts. Two vectors of memory. Meant for maps with an objective (OptEq, energies with
    0 ≼ −∇²E ≼ I); for others, such as Deep OptEq or MDEQ, use `Anderson`.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)), solver=eq.Accelerated())
        >>> layer(torch.tensor([[1.0, -1.0]]))
        tensor([[1., 0.]], grad_fn=...)
    """

    drop_share: float = 0.25

    @property
    def steady(self) -> bool:
        return False

    def begin(self, start: Tensor) -> Momentum:
        return Momentum(previous=start, time=start.new_ones(start.shape[0]))

    def propose(self, memory: Momentum, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        advance = image - memory.previous
        uphill = torch.linalg.vecdot(change, advance) < 0
        time = torch.where(uphill, 1.0, memory.time)
        following = 0.5 * (1 + torch.sqrt(1 + 4 * time.square()))
        momentum = torch.where(uphill, 0.0, (time - 1) / following)
        memory.previous = image
        memory.time = following
        return torch.addcmul(image, momentum[:, None], advance, out=advance)
