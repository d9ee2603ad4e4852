"""What linear solvers share: rows in units of their own, true residuals, an honest report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from equilibria.registry import check_at_least_one, check_below_one
from equilibria.solvers.convergence import (
    final_status,
    relative_residual,
    row_norms,
    row_rounding,
    row_units,
)
from equilibria.solvers.solution import Status

LinearMap = Callable[[Tensor], Tensor]
"""v ↦ A v on the rows of a `(problems, size)` buffer."""

PROGRESS = 0.999
"""A run that leaves more than this share of the residual is a row's last."""

TRUSTED = 0.05
"""The share of the goal that rounding may add to a residual that a method carried along."""

ROUNDING = 4
"""How many roundings of u a residual shows."""


@dataclass(frozen=True)
class LinearSolution:
    """The solution of A u = g for each row, and how well it was found."""

    value: Tensor
    status: Tensor
    residual: Tensor
    """Relative residual ‖g − A u‖ / ‖g‖, as evaluated at the end."""
    iterations: Tensor
    evaluations: int
    tolerance: float
    method: str

    @property
    def converged(self) -> Tensor:
        """Whether each solve converged."""
        return self.status == Status.CONVERGED

    def summary(self) -> str:
        """Describe in one sentence how many solves converged."""
        total = self.status.numel()
        failed = int((~self.converged).sum())
        if failed == 0:
            return f"all {total} backward solves converged to {self.tolerance:.1e} ({self.method})"
        worst = int(torch.argmax(torch.nan_to_num(self.residual, nan=torch.inf)))
        return (
            f"the backward solve ({self.method}) of {failed} of {total} samples did not converge, "
            f"so their gradient is inexact: the worst relative residual is "
            f"{float(self.residual[worst]):.1e}, the tolerance {self.tolerance:.1e}. Raise "
            "max_iterations or the tolerance of the gradient rule, or bound the norm of W "
            "(norm='bound')"
        )


class KrylovRun(NamedTuple):
    """What one run of a method found for A d = r."""

    correction: Tensor
    iterations: Tensor
    evaluations: int
    broken: Tensor
    """Rows for which the method does not work."""
    norm: Tensor | None = None
    """Of the residual r − A d, as the method carried it along, if it did."""


def refine(
    method: str,
    run: Callable[[Tensor, Tensor, int], KrylovRun],
    operator: LinearMap,
    rhs: Tensor,
    start: Tensor | None,
    tolerance: float,
    max_iterations: int,
    epsilon: float | None,
    relative_to: Tensor | None = None,
) -> LinearSolution:
    """Solve A u = g by u ← u + d, each d from a run of a method on A d = g − A u.

    The residual that a method carries along drifts from the true one by rounding, by about
    epsilon ‖u‖ a product: where that is no small share of the goal it is evaluated after a run, so
    that what is reported is true. Rows are solved in units of their own size, so that no square
    of theirs vanishes or overflows.

    run: takes r, which it may overwrite and which is zero in rows that are done, the norm to reach
        in each row, and how many products with A are left.
    epsilon: the relative precision of the products, by default that of the numbers. The tolerance
        is not taken below it. Products with a u that is much larger than g leave a residual of
        about epsilon ‖u‖, which counts as converged up to ten times the tolerance.
    relative_to: what residuals are relative to the norm of; by default g.
    """
    check_below_one(tolerance=tolerance)
    check_at_least_one(max_iterations=max_iterations)
    whole = rhs if relative_to is None else relative_to
    unit = row_units(whole)
    if unit is not None:
        rhs, whole, start = rhs / unit, whole / unit, None if start is None else start / unit
    scale = row_norms(whole)
    norm = scale if relative_to is None else row_norms(rhs)
    # No value stands for zero, which need not be held in memory.
    value: Tensor | None = None
    residual, evaluations = rhs, 0
    if start is not None:
        after, evaluations = rhs - operator(start), 1
        # Written so that a NaN is no improvement, here and below.
        better = row_norms(after) < norm
        value = torch.where(better[:, None], start, 0.0)
        residual = torch.where(better[:, None], after, residual)
        norm = torch.where(better, row_norms(after), norm)
    epsilon = torch.finfo(rhs.dtype).eps if epsilon is None else epsilon
    tolerance = max(tolerance, epsilon)
    goal = tolerance * scale
    iterations = torch.zeros(rhs.shape[0], dtype=torch.int64, device=rhs.device)
    broken = ~torch.isfinite(norm)
    converged = norm <= goal
    going = ~converged & ~broken
    aim, remaining = (1 - TRUSTED) * goal, max_iterations
    while remaining > 0 and bool(going.any()):
        found = run(torch.where(going[:, None], residual, 0.0), aim, remaining)
        if value is None and found.norm is not None:
            size = scale + row_norms(found.correction)
            drift = epsilon * found.iterations * size
            trusted = (found.norm <= aim) & (drift <= TRUSTED * goal)
            if bool((trusted | ~going).all()):
                value, norm = found.correction, torch.where(going, found.norm, norm)
                iterations, evaluations = found.iterations, found.evaluations
                converged = converged | going
                break
        candidate = found.correction if value is None else value + found.correction
        after = rhs - operator(candidate)
        size = row_norms(after)
        better = going & (size < norm)
        value = torch.where(better[:, None], candidate, 0.0 if value is None else value)
        residual = torch.where(better[:, None], after, residual)
        progress = better & (size < PROGRESS * norm)
        norm = torch.where(better, size, norm)
        iterations += found.iterations
        evaluations += found.evaluations + 1
        remaining -= found.evaluations
        converged = norm <= (ROUNDING * epsilon * row_norms(value)).clamp(goal, 10 * goal)
        broken = broken | (going & found.broken & ~converged)
        going = progress & ~converged & ~broken
        aim = goal / 2  # what is this close misses the goal by rounding
    value = torch.zeros_like(rhs) if value is None else value
    if unit is not None:
        value = value * unit
        lost = row_rounding(unit, rhs.shape[1])
        norm, converged = torch.maximum(norm, lost), converged & (lost <= goal)
    return LinearSolution(
        value=value,
        status=final_status(converged, ~broken),
        residual=relative_residual(norm, scale),
        iterations=iterations,
        evaluations=evaluations,
        tolerance=tolerance,
        method=method,
    )
