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
from equilibria.solvers._cpu import Scratch, is_cheap_to_read
from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.problem import FixedPointProblem


@dataclass
class History(Memory):
    """Ring buffer of the last residuals g of each row, and of the vectors that are mixed: goals.

    A goal is T(y) + (damping − 1) g; without damping it is T(y). `gram` holds ⟨gᵢ, gⱼ⟩ with
    the ridge on its diagonal; each iteration updates one row and one column. `in_use` is 0 for
    slots emptied by a restart and 1 for the others, or None if no row has restarted. An empty slot
    has ∞ on the diagonal of `gram` and zeros in the rest of its row and column.
    """

    goals: Tensor
    residuals: Tensor
    gram: Tensor
    scratch: Scratch
    in_use: Tensor | None = None
    written: int = 0

    def __post_init__(self) -> None:
        self.slots = self.gram.shape[1]
        # Views are made once: indexing takes as long as an operation on a small state.
        self.goal_slots, self.residual_slots = self.goals.unbind(1), self.residuals.unbind(1)
        self.gram_rows, self.gram_columns = self.gram.unbind(1), self.gram.unbind(2)
        self.ones = self.gram.new_ones(self.gram.shape[0], self.slots, 1)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.__post_init__()

    def difference(self, image: Tensor, point: Tensor) -> Tensor:
        """Return T(y) − y, written into the slot that `push` fills next."""
        return torch.sub(image, point, out=self.residual_slots[self.written % self.slots])

    def push(self, image: Tensor, change: Tensor, damping: float, ridge: float) -> tuple[int, int]:
        """Write the newest residual and goal over the oldest, and update `gram`.

        Returns:
            The slot, and the number of slots that have been written.
        """
        slot = self.written % self.slots
        self.written += 1
        used = min(self.written, self.slots)
        goal, residual = self.goal_slots[slot], self.residual_slots[slot]
        if change.data_ptr() != residual.data_ptr():  # not computed by `difference`
            residual.copy_(change)
        if damping == 1:
            goal.copy_(image)
        else:
            torch.add(image, change, alpha=damping - 1, out=goal)
        residuals = self.first(self.residuals, used)
        # A batched row-vector product takes a tenth of the time of a column-vector product.
        products = torch.bmm(change.unsqueeze(1), residuals.mT).squeeze(1)
        row = products.to(self.gram.dtype)
        if self.in_use is not None:
            self.in_use.select(1, slot).fill_(1)
            row = torch.where(self.in_use[:, :used] > 0, row, 0.0)
        row.select(1, slot).mul_(1 + ridge)
        self.first(self.gram_rows[slot], used).copy_(row)
        self.first(self.gram_columns[slot], used).copy_(row)
        return slot, used

    def first(self, tensor: Tensor, used: int) -> Tensor:
        """Return the entries of the slots that have been written."""
        return tensor if used == self.slots else tensor[:, :used]

    def forget(self, rows: Tensor, slot: int) -> None:
        """Empty all slots of these rows except `slot`, and `slot` too if its residual is zero."""
        newest = torch.zeros_like(self.gram[0, 0])
        newest[slot] = 1.0
        square = self.gram[:, slot, slot, None]
        kept = newest * ((square > 0) & torch.isfinite(square))
        in_use = torch.ones_like(kept) if self.in_use is None else self.in_use
        self.in_use = torch.where(rows[:, None], kept, in_use)
        both = self.in_use[:, :, None] * self.in_use[:, None, :] > 0
        empty = torch.full_like(newest, torch.inf).diag()
        self.gram.copy_(torch.where(both, self.gram, empty))


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[History]):
    """Anderson acceleration of type II (Walker and Ni, 2011).

    y ← Σ αᵢ T(yᵢ) with α the minimizer of ‖Σ αᵢ gᵢ‖, Σ αᵢ = 1, gᵢ = T(yᵢ) − yᵢ. A sample with a
    nearly singular system, or whose residual jumps, drops its history and takes a plain step.

    Args:
        memory: Number of points that are mixed.
        ridge: Regularization of the system, relative to the squared norm of each residual.
        cap: Restart a sample whose coefficients exceed this 1-norm or are not finite.
        damping: 1 mixes images only, less than 1 also the points themselves. More than 1
            extrapolates beyond the images, for maps that take short steps.
        restart_growth: Restart a sample when its residual exceeds the smallest one in its history
            by this factor.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
        patience, check_every, drop_share, iterate: See `Solver`.

    Examples:
        >>> f, solver = lambda z, x: torch.cos(z) + x, eq.Anderson(memory=3, tolerance=1e-6)
        >>> round(eq.fixed_point(f, torch.zeros(1, 1), solver=solver).item(), 4)
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

    def starts_steady(self, problem: FixedPointProblem) -> bool:
        # The first step is damped. A monotone map is a proximal gradient step: the composition of
        # two firmly nonexpansive maps, so y ↦ y + d(T(y) − y) is nonexpansive for d ≤ 3/2.
        return self.damping <= 1 or (problem.monotone and self.damping < 1.5)

    def begin(self, start: Tensor) -> History:
        rows, size = start.shape
        # Slots are read only once they have been written.
        scratch = Scratch(start, 2 * rows * self.memory * size)
        goals, residuals = scratch.room.view(2, rows, self.memory, size)
        # The systems are so small that double precision costs nothing.
        double = torch.float32 if start.device.type == "mps" else torch.float64
        gram = start.new_zeros(rows, self.memory, self.memory, dtype=double)
        return History(goals, residuals, gram, scratch)

    def propose(self, memory: History, point: Tensor, image: Tensor, change: Tensor) -> Tensor:
        slot, used = memory.push(image, change, self.damping, self.ridge)
        if used == 1:
            return image if self.damping == 1 else memory.goals[:, 0].clone()
        weights = self._weights(memory, slot, used)
        # The linear solve returns another memory layout, for which `bmm` takes three times as long.
        weights = weights.to(image.dtype, memory_format=torch.contiguous_format)
        return torch.bmm(weights.unsqueeze(1), memory.first(memory.goals, used)).squeeze(1)

    def _weights(self, memory: History, slot: int, used: int) -> Tensor:
        """Return the coefficients α of each row; rows with unsound coefficients restart."""
        gram = memory.gram if used == self.memory else memory.gram[:, :used, :used]
        ones = memory.first(memory.ones, used)
        if memory.in_use is not None:
            ones = memory.in_use[:, :used].unsqueeze(2)
        weights: Tensor = torch.linalg.solve_ex(gram, ones)[0].squeeze(2)
        weights /= weights.sum(dim=1, keepdim=True)
        # NaN counts as unsound. A zero residual makes the system singular: its solution is NaN.
        squares = gram.diagonal(dim1=1, dim2=2)
        largest = squares.amin(dim=1).mul_(self.restart_growth**2)
        sound = weights.abs().sum(dim=1) <= self.cap
        sound &= squares.select(1, slot) <= largest
        if memory.in_use is None and is_cheap_to_read(sound) and bool(sound.all()):
            return weights
        memory.forget(~sound, slot)
        newest = torch.zeros_like(weights)
        newest[:, slot] = 1.0
        return torch.where(sound[:, None], weights, newest)
