"""BiCGSTAB, each row on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers.convergence import row_norms
from equilibria.solvers.linear.base import KrylovRun, LinearMap, LinearSolution, refine


def bicgstab(
    operator: LinearMap,
    rhs: Tensor,
    *,
    start: Tensor | None = None,
    tolerance: float,
    max_iterations: int,
    epsilon: float | None = None,
    relative_to: Tensor | None = None,
) -> LinearSolution:
    """Solve A u = g by BiCGSTAB (van der Vorst, 1992) for any square A.

    Eight vectors of memory however long it runs, against GMRES's `restart` + 1, for two products
    with A an iteration. A row that breaks down (ρ or ω vanishes) keeps its best iterate and is
    reported as diverged. An iteration here is one product, as for the other solvers.

    Examples:
        >>> A, g = torch.tensor([[2.0, 1.0], [0.0, 4.0]]), torch.tensor([[4.0, 4.0]])
        >>> found = eq.solvers.bicgstab(lambda u: u @ A.T, g, tolerance=1e-5, max_iterations=9)
        >>> found.value.round(decimals=3)
        tensor([[1.5000, 1.0000]])
    """

    def run(rhs: Tensor, goal: Tensor, limit: int) -> KrylovRun:
        solution, residual, shadow, direction = torch.zeros_like(rhs), rhs, rhs, rhs
        rho = torch.linalg.vecdot(shadow, residual)
        norm = row_norms(residual)
        best, best_norm = solution, norm
        broken = ~torch.isfinite(norm)
        iterations = torch.zeros(rhs.shape[0], dtype=torch.int64, device=rhs.device)
        evaluations = 0
        tiny = torch.finfo(rhs.dtype).tiny
        active = ~(norm <= goal) & ~broken
        for _ in range(max(1, limit // 2)):
            if not bool(active.any()):
                break
            image = operator(direction)
            step = _quotient(rho, torch.linalg.vecdot(shadow, image), active, tiny)
            half = torch.addcmul(residual, -step[:, None], image)
            correction = operator(half)
            evaluations += 2
            iterations += 2 * active
            omega = _quotient(
                torch.linalg.vecdot(correction, half),
                torch.linalg.vecdot(correction, correction),
                active,
                tiny,
            )
            solution = solution + step[:, None] * direction + omega[:, None] * half
            residual = torch.addcmul(half, -omega[:, None], correction)
            norm = row_norms(residual)
            improved = active & (norm < best_norm)
            best = torch.where(improved[:, None], solution, best)
            best_norm = torch.where(improved, norm, best_norm)
            following = torch.linalg.vecdot(shadow, residual)
            ratio = _quotient(following, rho, active, tiny) * _quotient(step, omega, active, tiny)
            direction = torch.addcmul(
                residual, ratio[:, None], torch.addcmul(direction, -omega[:, None], image)
            )
            rho = following
            stuck = (omega == 0) | (step == 0) | ~torch.isfinite(norm)
            broken = broken | (active & stuck & ~(best_norm <= goal))
            active = active & ~(norm <= goal) & ~broken
        return KrylovRun(best, iterations, evaluations, broken)

    return refine(
        "BiCGSTAB", run, operator, rhs, start, tolerance, max_iterations, epsilon, relative_to
    )


def _quotient(numerator: Tensor, denominator: Tensor, active: Tensor, tiny: float) -> Tensor:
    """Return numerator / denominator where that is defined, zero elsewhere."""
    sound = active & (denominator.abs() > tiny)
    return torch.where(sound, numerator / torch.where(sound, denominator, 1.0), 0.0)
