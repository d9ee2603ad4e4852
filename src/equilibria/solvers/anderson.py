"""Anderson acceleration, type II."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.registry import (
    check_above_one,
    check_at_least_one,
    check_not_negative,
    check_positive,
)
from equilibria.solvers.asking import is_free_to_ask
from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.scratch import Scratch


@dataclass
class History(Memory):
    """The last residuals of each row and what is mixed of them, in buffers allocated once.

    goals: T(y) + (damping − 1) g, which is the image where nothing is damped.

    `gram` holds ⟨g_i, g_j⟩ of the residuals, the ridge on its diagonal, and is updated by one row
    an iteration. `in_use` is 0 for the slots that a restart has emptied and 1 for the others, and
    None where nothing has restarted; an empty slot has ∞ on the diagonal and zeros beside it.
    """

    goals: Tensor
    residuals: Tensor
    gram: Tensor
    scratch: Scratch
    in_use: Tensor | None = None
    written: int = 0

    def difference(self, image: Tensor, point: Tensor) -> Tensor:
        """In the slot where `propose` wants it."""
        slot = self.residuals.select(1, self.written % self.residuals.shape[1])
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
        check_above_one(restart_growth=self.restart_growth)

    @property
    def steady(self) -> bool:
        return self.damping <= 1

    def begin(self, start: Tensor) -> History:
        rows, size = start.shape
        # Slots are read only once they have been written.
        scratch = Scratch(start, 2 * rows * self.memory * size)
        goals, residuals = scratch.room.view(2, rows, self.memory, size)
        # The systems have a handful of unknowns: double precision costs nothing and saves digits.
        double = torch.float32 if start.device.type == "mps" else torch.float64
        gram = start.new_zeros(rows, self.memory, self.memory, dtype=double)
        return History(goals, residuals, gram, scratch)

    def propose(self, memory: History, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        slot = memory.written % self.memory
        memory.written += 1
        used = min(memory.written, self.memory)
        goals, residuals = memory.goals[:, :used], memory.residuals[:, :used]
        goal, own = goals.select(1, slot), residuals.select(1, slot)
        if change.data_ptr() != own.data_ptr():  # not made by `difference`
            own.copy_(change)
        if self.damping == 1:
            goal.copy_(image)
        else:
            torch.add(image, change, alpha=self.damping - 1, out=goal)
        products = torch.bmm(change[:, None], residuals.transpose(1, 2))[:, 0]
        weights = self._weights(memory, products, slot, used)
        if used == 1:
            return image if self.damping == 1 else goal.clone()
        # Row by row, not as the linear solve left them: that product takes thrice the time.
        weights = weights.to(image.dtype, memory_format=torch.contiguous_format)
        return torch.bmm(weights[:, None], goals)[:, 0]

    def _weights(self, memory: History, products: Tensor, slot: int, used: int) -> Tensor:
        """The coefficients α of each row, given the newest residual's products with all."""
        gram = memory.gram[:, :used, :used]
        row = products.to(gram.dtype)
        ones = gram.new_ones(())
        if memory.in_use is not None:
            memory.in_use.select(1, slot).fill_(1)
            ones = memory.in_use[:, :used]
            row = torch.where(ones > 0, row, 0.0)
        square = row.select(1, slot).mul_(1 + self.ridge)
        gram.select(1, slot).copy_(row)
        gram.select(2, slot).copy_(row)
        if used == 1:
            return row
        weights: Tensor = torch.linalg.solve_ex(gram, ones.expand_as(row))[0]
        weights /= weights.sum(dim=1, keepdim=True)
        # Written so that a NaN counts as not sound, and a zero residual too.
        smallest = gram.diagonal(dim1=1, dim2=2).amin(dim=1)
        sound = (square <= self.restart_growth**2 * smallest) & (square > 0)
        sound &= weights.abs().sum(dim=1) <= self.cap
        if memory.in_use is None and is_free_to_ask(sound) and bool(sound.all()):
            return weights
        return self._restarted(memory, weights, sound[:, None], slot, used)

    def _restarted(
        self, memory: History, weights: Tensor, sound: Tensor, slot: int, used: int
    ) -> Tensor:
        """The weights; rows that are not sound take the newest image and keep its slot alone."""
        gram = memory.gram
        newest = torch.zeros(self.memory, dtype=gram.dtype, device=gram.device)
        newest[slot] = 1.0
        square = gram[:, slot, slot, None]
        kept = newest * ((square > 0) & torch.isfinite(square))
        in_use = torch.ones_like(kept) if memory.in_use is None else memory.in_use
        memory.in_use = torch.where(sound, in_use, kept)
        both = memory.in_use[:, :, None] * memory.in_use[:, None, :] > 0
        empty = torch.full_like(newest, torch.inf).diag()
        memory.gram = torch.where(both, gram, empty)
        return torch.where(sound, weights, newest[:used])
