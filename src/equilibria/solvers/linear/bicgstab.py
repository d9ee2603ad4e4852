"""BiCGSTAB for batches of independent rows."""

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

    Stores eight vectors, where GMRES stores up to `restart` + 1, and needs two products with A per
    step. A row that breaks down (ρ or ω vanishes) keeps its best iterate and has
    `Status.DIVERGED`.

    Args:
        operator: v ↦ A v on rows, shape (rows, size) to (rows, size).
        rhs: g, shape (rows, size).
        start: Start of u; by default zero.
        tolerance: Relative residual ‖g − A u‖ / ‖g‖ at which a row has converged.
        max_iterations: Largest number of products with A. Reported iterations also count products.
        epsilon: Relative precision of the products; by default the machine epsilon of `rhs`.
        relative_to: Vectors to whose norm residuals are relative; by default `rhs`.

    Returns:
        Solution, status and residual of each row.

    Examples:
        >>> A, g = torch.tensor([[2.0, 1.0], [0.0, 4.0]]), torch.tensor([[4.0, 4.0]])
        >>> result = eq.solvers.bicgstab(lambda u: u @ A.T, g, tolerance=1e-5, max_iterations=9)
        >>> result.value.round(decimals=3)
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
    """Return numerator / denominator where it is defined, else zero."""
    sound = active & (denominator.abs() > tiny)
    return torch.where(sound, numerator / torch.where(sound, denominator, 1.0), 0.0)
