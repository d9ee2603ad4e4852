"""Anderson acceleration, type II."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.solvers.base import Memory, Solver


@dataclass
class History(Memory):
    """The last images and residuals of each row, in buffers allocated once.

    `gram` holds ⟨g_i, g_j⟩ of the residuals and is updated by one row an iteration; `valid` marks
    the slots in use, which differ from row to row after a restart.
    """

    images: Tensor
    residuals: Tensor
    gram: Tensor
    valid: Tensor
    next_slot: int = 0

    def keep(self, rows: Tensor) -> None:
        self.images = self.images[rows]
        self.residuals = self.residuals[rows]
        self.gram = self.gram[rows]
        self.valid = self.valid[rows]


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[History]):
    """y ← Σ αᵢ T(yᵢ) with α the minimiser of ‖Σ αᵢ gᵢ‖, Σ αᵢ = 1, gᵢ = T(yᵢ) − yᵢ.

    (Walker and Ni, 2011.) The ridge is relative to each residual's own size, so that a solve does
    not depend on the scale of the problem. A row whose coefficients are not finite or exceed `cap`
    in the 1-norm (a nearly singular system), or whose residual jumps by `restart_growth`, forgets
    its history and takes a plain step.

    memory: how many earlier points are mixed.
    damping: 1 mixes images only; less mixes in the points themselves.
    """

    memory: int = 5
    ridge: float = 1e-8
    cap: float = 1e3
    damping: float = 1.0
    restart_growth: float = 1e2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1, not {self.memory}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be in (0, 1], not {self.damping}")
        if self.ridge < 0 or self.cap < 1 or self.restart_growth <= 1:
            raise ValueError("ridge must be >= 0, cap >= 1 and restart_growth > 1")

    def begin(self, start: Tensor) -> History:
        rows, size = start.shape
        return History(
            images=start.new_zeros(rows, self.memory, size),
            residuals=start.new_zeros(rows, self.memory, size),
            gram=start.new_zeros(rows, self.memory, self.memory),
            valid=torch.zeros(rows, self.memory, dtype=torch.bool, device=start.device),
        )

    def propose(self, memory: History, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        slot = memory.next_slot
        memory.next_slot = (slot + 1) % self.memory
        memory.images[:, slot] = image
        memory.residuals[:, slot] = change
        products = torch.bmm(change[:, None], memory.residuals.transpose(1, 2))[:, 0]
        memory.gram[:, slot, :] = products
        memory.gram[:, :, slot] = products
        memory.valid[:, slot] = True
        self._forget_jumps(memory, slot)
        weights = self._weights(memory, slot).to(image.dtype)
        mixed = torch.bmm(weights[:, None], memory.images)[:, 0]
        if self.damping < 1:
            mixture = torch.bmm(weights[:, None], memory.residuals)[:, 0]
            mixed = mixed - (1 - self.damping) * mixture
        return mixed

    def _forget_jumps(self, memory: History, slot: int) -> None:
        """Restart the rows whose residual has grown far beyond the smallest one remembered."""
        squares = torch.diagonal(memory.gram, dim1=1, dim2=2)
        smallest = torch.where(memory.valid, squares, torch.inf).amin(dim=1)
        jumped = squares[:, slot] > self.restart_growth**2 * smallest
        self._restart(memory, slot, jumped)

    def _weights(self, memory: History, slot: int) -> Tensor:
        """The coefficients α of each row; invalid slots get none."""
        # The system has a handful of unknowns: double precision costs nothing and saves digits.
        double = torch.float32 if memory.gram.device.type == "mps" else torch.float64
        gram = memory.gram.to(double)
        valid = memory.valid
        size = torch.diagonal(gram, dim1=1, dim2=2).sqrt()
        inverse = torch.where(valid & (size > 0), 1 / size, 0.0)
        correlation = gram * inverse[:, :, None] * inverse[:, None, :]
        unused = torch.where(valid & (size > 0), self.ridge, 1.0)
        system = correlation + torch.diag_embed(unused)
        scaled, _ = torch.linalg.solve_ex(system, inverse)
        weights = scaled * inverse
        weights = weights / weights.sum(dim=1, keepdim=True)
        # A NaN sum compares false: such rows fall back too.
        sound = weights.abs().sum(dim=1) <= self.cap
        self._restart(memory, slot, ~sound)
        newest = torch.zeros_like(weights)
        newest[:, slot] = 1
        return torch.where(sound[:, None], weights, newest)

    def _restart(self, memory: History, slot: int, rows: Tensor) -> None:
        """Forget all but the newest point of some rows."""
        newest = torch.zeros_like(memory.valid)
        newest[:, slot] = True
        memory.valid = torch.where(rows[:, None], newest, memory.valid)
