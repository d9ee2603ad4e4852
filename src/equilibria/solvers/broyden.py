"""Broyden's method with limited memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.registry import check_above_one, check_at_least_one
from equilibria.solvers._cpu import Scratch
from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.problem import FixedPointProblem


@dataclass
class InverseJacobian(Memory):
    """B = −I + UᵀV, an approximation of the inverse Jacobian of y ↦ T(y) − y, for each row.

    The pairs (u_i, v_i) are stored in preallocated buffers of `rank` slots. When these are full, B
    restarts from −I: overwriting the oldest pair would invalidate those that were built on it.
    """

    left: Tensor
    right: Tensor
    step: Tensor | None
    """Last step y_k − y_{k−1} = −B g_{k−1}; None before the first."""
    smallest: Tensor
    """Smallest residual of each row since its last restart."""
    scratch: Scratch
    written: int = 0

    def pairs(self) -> tuple[Tensor, Tensor]:
        return self.left[:, : self.written], self.right[:, : self.written]


@dataclass(frozen=True, kw_only=True)
class Broyden(Solver[InverseJacobian]):
    """Broyden's "good" method y ← y − B g(y), g(y) = T(y) − y, B ≈ (∂g/∂y)⁻¹.

    (Broyden, 1965; for equilibrium models Bai et al., 2019.) Updates whose denominator nearly
    vanishes are skipped.

    Args:
        rank: Largest number of rank-one updates of B that are stored.
        restart_growth: Restart a sample from B = −I, which is a plain step, when its residual
            exceeds its smallest residual by this factor.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
        patience, check_every, drop_share, iterate: See `Solver`.

    Examples:
        >>> f, solver = lambda z, x: torch.cos(z) + x, eq.Broyden(rank=5, tolerance=1e-6)
        >>> round(eq.fixed_point(f, torch.zeros(1, 1), solver=solver).item(), 4)
        0.7391
    """

    rank: int = 8
    restart_growth: float = 1e2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(rank=self.rank)
        check_above_one(restart_growth=self.restart_growth)

    def starts_steady(self, problem: FixedPointProblem) -> bool:
        return True  # the first step is plain

    def begin(self, start: Tensor) -> InverseJacobian:
        rows, size = start.shape
        scratch = Scratch(start, 2 * rows * self.rank * size)
        left, right = scratch.room.view(2, rows, self.rank, size)
        return InverseJacobian(
            left=left,
            right=right,
            step=None,
            smallest=start.new_full((rows,), torch.inf),
            scratch=scratch,
        )

    def propose(
        self, memory: InverseJacobian, point: Tensor, image: Tensor, change: Tensor
    ) -> Tensor:
        size = torch.linalg.vector_norm(change, dim=1)
        if memory.step is None:
            memory.step, memory.smallest = change, size
            return image
        # Written so that a NaN counts as a jump.
        jumped = ~(size <= self.restart_growth * memory.smallest)
        has_jumps = bool(jumped.any())
        memory.smallest = torch.minimum(size, memory.smallest)
        if has_jumps:
            memory.smallest = torch.where(jumped, size, memory.smallest)
            memory.left[jumped, : memory.written] = 0
        if memory.written == self.rank:
            memory.written = 0
        applied = self._apply(memory, change)
        left, right, sound = self._update(memory, memory.step, applied)
        if has_jumps:
            sound &= ~jumped
        slot = memory.written
        memory.written += 1
        left = torch.where(sound.unsqueeze(1), left, 0.0)
        memory.left.select(1, slot).copy_(left)
        memory.right.select(1, slot).copy_(right)
        correction = torch.linalg.vecdot(right, change).unsqueeze(1) * left
        memory.step = -(applied + correction)
        following: Tensor = point + memory.step
        return following

    def _apply(self, memory: InverseJacobian, vector: Tensor) -> Tensor:
        """Return B v."""
        left, right = memory.pairs()
        weights = torch.bmm(vector.unsqueeze(1), right.mT)
        applied: Tensor = torch.bmm(weights, left).squeeze(1) - vector
        return applied

    def _update(
        self, memory: InverseJacobian, step: Tensor, applied: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pair (u, v) of B ← B + u vᵀ, and whether it is numerically sound.

        u = (s − B d)/(sᵀB d), v = Bᵀs with s the last step and d = g_k − g_{k−1}. Since
        s = −B g_{k−1}, B d = B g_k + s: one application of B serves both, and u = −B g_k/(sᵀB d).
        """
        left, right = memory.pairs()
        weights = torch.bmm(step.unsqueeze(1), left.mT)
        transposed = torch.bmm(weights, right).squeeze(1) - step
        denominator = torch.linalg.vecdot(step, applied + step)
        scale = torch.linalg.vecdot(step, step)
        sound = denominator.abs() > 1e-6 * scale
        return -applied / torch.where(sound, denominator, 1.0).unsqueeze(1), transposed, sound
