"""Conjugate gradients in a weighted inner product, for batches of independent rows."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.solvers._cpu import Scratch
from equilibria.solvers.convergence import row_norms
from equilibria.solvers.linear.base import KrylovRun, LinearMap, LinearSolution, refine


def conjugate_gradients(
    operator: LinearMap,
    rhs: Tensor,
    weight: Tensor | None = None,
    *,
    start: Tensor | None = None,
    tolerance: float,
    max_iterations: int,
    epsilon: float | None = None,
    relative_to: Tensor | None = None,
) -> LinearSolution:
    """Solve A u = g where A is self-adjoint and positive in ⟨a, b⟩_S = aᵀSb, S = diag(weight) ≥ 0.

    For an energy model A = I − Jᵀ = I − HS with H symmetric. A row with pᵀSAp ≤ 0 stops with
    `Status.DIVERGED`: A is not positive, so the point is not a minimum.

    Args:
        operator: v ↦ A v on rows, shape (rows, size) to (rows, size).
        rhs: g, shape (rows, size).
        weight: Diagonal of S, shape (rows, size); by default ones.
        start: Start of u; by default zero.
        tolerance: Relative residual ‖g − A u‖ / ‖g‖ at which a row has converged.
        max_iterations: Largest number of products with A.
        epsilon: Relative precision of the products; by default the machine epsilon of `rhs`.
        relative_to: Vectors to whose norm residuals are relative; by default `rhs`.

    Returns:
        Solution, status and residual of each row.

    Examples:
        >>> A, g = torch.tensor([2.0, 5.0]), torch.tensor([[4.0, 5.0]])  # a diagonal A
        >>> result = eq.solvers.conjugate_gradients(A.mul, g, tolerance=1e-5, max_iterations=9)
        >>> result.value.round(decimals=3)
        tensor([[2., 1.]])
    """

    def run(residual: Tensor, goal: Tensor, limit: int) -> KrylovRun:
        return weighted_run(operator, residual, weight, goal, limit)

    return refine(
        "conjugate gradients",
        run,
        operator,
        rhs,
        start,
        tolerance,
        max_iterations,
        epsilon,
        relative_to,
    )


def weighted_run(
    operator: LinearMap, residual: Tensor, weight: Tensor | None, goal: Tensor, limit: int
) -> KrylovRun:
    """Run conjugate gradients on A u = r until ‖r − Au‖_S ≤ goal; overwrites r.

    Stores four vectors. S may have zeros, which the inner product ignores; u + r = g + HSu is exact
    there as soon as Su is. So r is added to u at the end. Where S is not zero, only the share of a
    Richardson step is added: 1/(λS) with λ the largest curvature along the search directions.
    """
    scratch = Scratch(residual, 2 * residual.numel())
    products, direction = scratch.room.view(2, *residual.shape)

    def inner(a: Tensor, b: Tensor) -> Tensor:
        product = torch.mul(a, b, out=products)
        return (product if weight is None else product.mul_(weight)).sum(dim=1)

    def squared(a: Tensor) -> Tensor:
        return row_norms(a).square_() if weight is None else inner(a, a)

    threshold = goal.square()
    solution = torch.zeros_like(residual)
    direction.copy_(residual)
    square = squared(residual)
    # A NaN compares false and so stops its row.
    active = square > threshold
    iterations = torch.zeros(residual.shape[0], dtype=torch.int64, device=residual.device)
    steps: list[Tensor] = []
    while len(steps) < limit and bool(active.any()):
        image = operator(direction)
        iterations += active
        curvature = inner(direction, image)
        active = active & (curvature > 0)
        step = torch.where(active, square / curvature, 0.0)[:, None]
        steps.append(step)
        torch.addcmul(solution, step, direction, out=solution)
        torch.addcmul(residual, step, image, value=-1, out=residual)
        following = squared(residual)
        conjugacy = torch.where(active, following / square, 0.0)[:, None]
        torch.addcmul(residual, conjugacy, direction, out=direction)
        square = torch.where(active, following, square)
        active = active & (square > threshold)
    broken = ~active & ~(square <= threshold)
    scratch.give_back()
    # Without a weight, the Richardson step below reduces the norm further.
    norm = square.sqrt() if weight is None else None
    if steps:
        taken = torch.stack(steps)
        shortest = torch.where(taken > 0, taken, 1.0).amin(dim=0)
        if bool((shortest < 1).any()):
            share = shortest if weight is None else shortest / weight
            torch.addcmul(solution, share.clamp_max(1.0), residual, out=solution)
            return KrylovRun(solution, iterations, len(steps), broken, norm)
    return KrylovRun(solution.add_(residual), iterations, len(steps), broken, norm)
