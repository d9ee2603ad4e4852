"""Restoration by total variation, a classical prior, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.operators import LinearOperator
from equilibria.registry import check_at_least_one, check_positive
from equilibria.restoration.problem import RestorationProblem

WEIGHTS = (0.3, 0.7, 1.0, 1.5, 3.0)
"""Weights that are compared, in units of the noise."""
STEP = 0.99 / 8**0.5
"""Step size of the dual variable; ‖∇‖² ≤ 8 for differences in two directions."""


@torch.no_grad()
def least_variation(
    measured: Tensor,
    measurement: LinearOperator,
    weight: float,
    start: Tensor,
    iterations: int = 200,
) -> Tensor:
    """Minimize ½‖Ay − x‖² + weight · TV(y), with isotropic TV, joint over the colors.

    Uses the primal-dual method of Condat and Vũ (2013) with the exact adjoint of A.

    Examples:
        >>> noisy = torch.rand(1, 1, 16, 16)
        >>> from equilibria.restoration.total_variation import least_variation
        >>> flat = least_variation(noisy, eq.operators.Identity(), 10.0, start=noisy)
        >>> bool(flat.std() < 0.01 * noisy.std())
        True
    """
    check_positive(weight=weight)
    check_at_least_one(iterations=iterations)
    norm = float(measurement.norm_bound(tuple(start.shape[1:])))
    primal = 0.99 / (norm**2 / 2 + STEP * 8) if norm else STEP
    dual_step = STEP
    y, dual = start.clone(), start.new_zeros(2, *start.shape)
    for _ in range(iterations):
        gradient = measurement.adjoint(measurement(y) - measured)
        new = y - primal * (gradient + _differences_adjoint(dual))
        dual = dual + dual_step * _differences(2 * new - y)
        size = dual.square().sum(dim=(0, 2), keepdim=True).sqrt()
        dual = dual / (size / weight).clamp_min(1)
        y = new
    return y


def best_variation(problem: RestorationProblem) -> Tensor:
    """Restore by total variation with the best of several weights.

    Args:
        problem: The problem. With a ground truth, the weight with the smallest squared error is
            used (an oracle); otherwise the weight follows from the noise.
    """
    measurement = problem.measurement
    assert isinstance(measurement, LinearOperator)
    start = problem.about.first_picture(problem.measured)
    scale = problem.noise if problem.about.keeps_all else problem.noise**2 * 10
    truth = problem.truth
    if truth is None:
        return least_variation(problem.measured, measurement, scale, start)
    candidates = [
        least_variation(problem.measured, measurement, weight * scale, start) for weight in WEIGHTS
    ]
    clamped = truth.clamp(0, 1)
    return min(candidates, key=lambda images: float((images.clamp(0, 1) - clamped).square().mean()))


def _differences(y: Tensor) -> Tensor:
    """Return ∇y: differences between rows and between columns."""
    result = y.new_zeros(2, *y.shape)
    result[0, ..., :-1, :] = y[..., 1:, :] - y[..., :-1, :]
    result[1, ..., :-1] = y[..., 1:] - y[..., :-1]
    return result


def _differences_adjoint(dual: Tensor) -> Tensor:
    """Apply ∇ᵀ, the transpose of `_differences`."""
    rows, columns = dual
    result = torch.zeros_like(rows)
    result[..., 1:, :] += rows[..., :-1, :]
    result[..., :-1, :] -= rows[..., :-1, :]
    result[..., 1:] += columns[..., :-1]
    result[..., :-1] -= columns[..., :-1]
    return result
