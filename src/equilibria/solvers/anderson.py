"""Anderson acceleration, type II."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.registry import check_at_least_one, check_not_negative, check_positive
from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.scratch import Scratch


@dataclass
class History(Memory):
    """The last images and residuals of each row, in buffers allocated once.

    `gram` holds ⟨g_i, g_j⟩ of the residuals and is updated by one row an iteration. A zero on its
    diagonal marks a slot that is not in use, which differs from row to row after a restart.
    """

    images: Tensor
    residuals: Tensor
    gram: Tensor
    scratch: Scratch
    written: int = 0

    def difference(self, image: Tensor, point: Tensor) -> Tensor:
        """In the slot where `propose` wants it."""
        slot = self.residuals[:, self.written % self.residuals.shape[1]]
        return torch.sub(image, point, out=slot)


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[History]):
    """y ← Σ αᵢ T(yᵢ) with α the minimizer of ‖Σ αᵢ gᵢ‖, Σ αᵢ = 1, gᵢ = T(yᵢ) − yᵢ.

    (Walker and Ni, 2011.) The ridge is relative to each residual's own size, so that a solve does
    not depend on the scale of the problem. A row whose coefficients are not finite or exceed `cap`
    in the 1-norm (a nearly singular system), or whose residual jumps by `restart_growth`, forgets
    its history and takes a plain step.

    memory: how many earlier points are mixed.
    damping: 1 mixes images only; less mixes in the points themselves; more goes beyond the images,
        for maps whose steps are as short as their steepest direction asks for.

    Examples:
        >>> f, mixing = lambda z, x: torch.cos(z) + x, eq.Anderson(memory=3, tolerance=1e-6)
        >>> round(eq.fixed_point(f, torch.zeros(1, 1), solver=mixing).item(), 4)
        0.7391
    """

    memory: int = 4
    ridge: float = 1e-8
    cap: float = 1e3
    damping: float = 1.0
    restart_growth: float = 1e2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(memory=self.memory, cap=self.cap)
        check_positive(damping=self.damping)
        check_not_negative(ridge=self.ridge)
        if self.restart_growth <= 1:
            raise ValueError(f"restart_growth must be above 1, not {self.restart_growth}")

    @property
    def steady(self) -> bool:
        return self.damping <= 1

    def begin(self, start: Tensor) -> History:
        rows, size = start.shape
        # Slots are read only once they have been written.
        scratch = Scratch(start, 2 * rows * self.memory * size)
        images, residuals = scratch.room.view(2, rows, self.memory, size)
        gram = start.new_zeros(rows, self.memory, self.memory)
        return History(images, residuals, gram, scratch)

    def propose(self, memory: History, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        slot = memory.written % self.memory
        memory.written += 1
        used = min(memory.written, self.memory)
        images, residuals = memory.images[:, :used], memory.residuals[:, :used]
        images[:, slot] = image
        if change.data_ptr() != residuals[:, slot].data_ptr():  # not made by `difference`
            residuals[:, slot] = change
        products = torch.bmm(change[:, None], residuals.transpose(1, 2))[:, 0]
        memory.gram[:, slot, :used] = products
        memory.gram[:, :used, slot] = products
        if used == 1:
            return image if self.damping == 1 else point + self.damping * change
        weights = self._weights(memory, slot, used).to(image.dtype)[:, None]
        mixed: Tensor = torch.bmm(weights, images)[:, 0]
        if self.damping != 1:
            mixed = mixed - (1 - self.damping) * torch.bmm(weights, residuals)[:, 0]
        return mixed

    def _weights(self, memory: History, slot: int, used: int) -> Tensor:
        """The coefficients α of each row; slots that a restart has emptied get none."""
        # The system has a handful of unknowns: double precision costs nothing and saves digits.
        double = torch.float32 if memory.gram.device.type == "mps" else torch.float64
        gram = memory.gram[:, :used, :used].to(double)
        squares = torch.diagonal(gram, dim1=1, dim2=2)
        usable = squares > 0
        smallest = torch.where(usable, squares, torch.inf).amin(dim=1)
        # Written so that a NaN counts as a jump.
        jumped = ~(squares[:, slot] <= self.restart_growth**2 * smallest)
        inverse = torch.where(usable, squares.rsqrt(), 0.0)
        system = gram * inverse[:, :, None] * inverse[:, None, :]
        # A slot that is not in use has a zero row, and then no weight.
        system.diagonal(dim1=1, dim2=2).fill_(1 + self.ridge)
        scaled, _ = torch.linalg.solve_ex(system, inverse)
        weights: Tensor = scaled * inverse
        weights = weights / weights.sum(dim=1, keepdim=True)
        # A NaN sum compares false: such rows restart too.
        sound = ((weights.abs().sum(dim=1) <= self.cap) & ~jumped)[:, None]
        newest = torch.zeros(used, dtype=weights.dtype, device=weights.device)
        newest[slot] = 1.0
        kept = memory.gram.diagonal(dim1=1, dim2=2)[:, :used]
        kept.copy_(torch.where(sound | (newest > 0), kept, 0.0))
        return torch.where(sound, weights, newest)
