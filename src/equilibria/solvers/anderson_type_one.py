"""Anderson acceleration, type I."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.registry import check_above_one, check_at_least_one, check_not_negative
from equilibria.solvers._cpu import Scratch
from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.problem import FixedPointProblem


@dataclass
class StepDifferences(Memory):
    """Last differences of points and of residuals of each row, in preallocated buffers.

    `products` holds ⟨Δy_i, Δg_j⟩; each iteration updates one row and one column.
    """

    points: Tensor
    residuals: Tensor
    products: Tensor
    valid: Tensor
    last_point: Tensor
    last_residual: Tensor
    smallest: Tensor
    """Smallest residual of each row since its last restart."""
    scratch: Scratch
    written: int = -1


@dataclass(frozen=True, kw_only=True)
class AndersonTypeOne(Solver[StepDifferences]):
    """Anderson acceleration of type I (Fang and Saad, 2009; Zhang et al., 2020).

    y ← T(y) − (ΔY + ΔG) γ with (ΔYᵀΔG) γ = ΔYᵀg, g = T(y) − y. Type II minimizes the mixed
    residual; type I is a form of Broyden's "good" method. It is often better on the joint systems
    of input optimization, but needs the safeguards `ridge`, `cap` and `restart_growth`.

    Args:
        memory: Number of differences that are stored.
        ridge: Regularization of the system, relative to the norm of each difference.
        cap: Restart a sample whose coefficients γ exceed this 1-norm; infinity sets no limit.
        restart_growth: Restart a sample when its residual exceeds the smallest since its last
            restart by this factor.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
        patience, check_every, drop_share, iterate: See `Solver`.

    Examples:
        >>> f, solver = lambda z, x: torch.cos(z) + x, eq.solvers.AndersonTypeOne(tolerance=1e-6)
        >>> round(eq.fixed_point(f, torch.zeros(1, 1), solver=solver).item(), 4)
        0.7391
    """

    memory: int = 5
    ridge: float = 1e-6
    cap: float = 10.0
    restart_growth: float = 1e2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(memory=self.memory)
        check_not_negative(ridge=self.ridge)
        if not self.cap > 0:  # infinity sets no limit
            raise ValueError(f"cap must be positive, got {self.cap}")
        check_above_one(restart_growth=self.restart_growth)

    def starts_steady(self, problem: FixedPointProblem) -> bool:
        return True  # the first step is plain

    def begin(self, start: Tensor) -> StepDifferences:
        rows, size = start.shape
        scratch = Scratch(start, 2 * rows * self.memory * size)
        points, residuals = scratch.room.view(2, rows, self.memory, size)
        return StepDifferences(
            points=points,
            residuals=residuals,
            products=start.new_zeros(rows, self.memory, self.memory),
            valid=torch.zeros(rows, self.memory, dtype=torch.bool, device=start.device),
            last_point=start,
            last_residual=start,
            smallest=start.new_full((rows,), torch.inf),
            scratch=scratch,
        )

    def propose(
        self, memory: StepDifferences, point: Tensor, image: Tensor, change: Tensor
    ) -> Tensor:
        size = torch.linalg.vector_norm(change, dim=1)
        # Written so that a NaN counts as a jump.
        jumped = ~(size <= self.restart_growth * memory.smallest)
        memory.smallest = torch.where(jumped, size, torch.minimum(size, memory.smallest))
        if memory.written < 0:
            memory.written = 0
            memory.last_point, memory.last_residual = point, change
            return image
        slot = memory.written % self.memory
        memory.written += 1
        used = min(memory.written, self.memory)
        points, residuals = memory.points[:, :used], memory.residuals[:, :used]
        torch.sub(point, memory.last_point, out=points[:, slot])
        torch.sub(change, memory.last_residual, out=residuals[:, slot])
        memory.last_point, memory.last_residual = point, change
        newest_point, newest_residual = points[:, slot, None], residuals[:, slot, None]
        memory.products[:, slot, :used] = torch.bmm(newest_point, residuals.transpose(1, 2))[:, 0]
        memory.products[:, :used, slot] = torch.bmm(newest_residual, points.transpose(1, 2))[:, 0]
        memory.valid[:, slot] = True
        projected = torch.bmm(change[:, None], points.transpose(1, 2))[:, 0]
        weights = self._weights(memory, points, projected, jumped, slot, used)
        weights = weights.to(image.dtype)[:, None]
        mixed: Tensor = torch.baddbmm(image[:, None], weights, points, alpha=-1)
        return torch.baddbmm(mixed, weights, residuals, alpha=-1)[:, 0]

    def _weights(
        self,
        memory: StepDifferences,
        points: Tensor,
        projected: Tensor,
        jumped: Tensor,
        slot: int,
        used: int,
    ) -> Tensor:
        """Return the coefficients γ of each row; zero for slots that a restart has emptied."""
        # The system is so small that double precision costs nothing.
        double = torch.float32 if points.device.type == "mps" else torch.float64
        sizes = torch.linalg.vector_norm(points, dim=2).to(double)
        usable = memory.valid[:, :used] & (sizes > 0)
        inverse = torch.where(usable, 1 / sizes, 0.0)
        # −ΔYᵀΔG is about ΔYᵀ(I − J)ΔY, positive for a contraction: a positive ridge helps.
        system = -memory.products[:, :used, :used].to(double)
        system = system * inverse[:, :, None] * inverse[:, None, :]
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += torch.where(usable, torch.full_like(sizes, self.ridge), torch.ones_like(sizes))
        scaled, _ = torch.linalg.solve_ex(system, -projected.to(double) * inverse)
        weights: Tensor = scaled * inverse
        # A system without a solution leaves NaN or Inf: such rows restart too.
        size = weights.abs().sum(dim=1)
        sound = torch.isfinite(size) & (size <= self.cap) & ~jumped
        if not bool(sound.all()):
            newest = torch.zeros_like(usable)
            newest[:, slot] = ~jumped
            memory.valid[:, :used] &= sound[:, None] | newest
            weights = torch.where(sound[:, None], weights, 0.0)
        return weights
