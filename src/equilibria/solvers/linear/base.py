"""Shared loop of the linear solvers: scaling, evaluated residuals, and the result of every row."""

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

MIN_RESIDUAL_REDUCTION = 0.999
"""A row stops after a run that leaves more than this share of its residual."""

MAX_DRIFT = 0.05
"""Largest rounding error of a recursively updated residual, as a share of the goal."""

ROUNDING_FACTOR = 4
"""Rounding error of a residual, in units of epsilon ‖u‖."""


@dataclass(frozen=True)
class LinearSolution:
    """Solution of A u = g for each row.

    Attributes:
        value: u, shape (rows, size).
        status: `Status` of each row.
        residual: Relative residual ‖g − A u‖ / ‖g‖ of each row.
        iterations: Number of iterations of each row.
        evaluations: Number of products with A.
        tolerance: Relative residual at which a row has converged.
        method: Name of the linear solver.
    """

    value: Tensor
    status: Tensor
    residual: Tensor
    iterations: Tensor
    evaluations: int
    tolerance: float
    method: str

    @property
    def converged(self) -> Tensor:
        """Whether each row converged."""
        return self.status == Status.CONVERGED

    def summary(self) -> str:
        """Describe in one sentence how many solves converged, with a remedy for failures."""
        total = self.status.numel()
        failed = int((~self.converged).sum())
        if failed == 0:
            return f"all {total} backward solves converged to {self.tolerance:.1e} ({self.method})"
        worst = int(torch.argmax(torch.nan_to_num(self.residual, nan=torch.inf)))
        return (
            f"the backward solve ({self.method}) of {failed} of {total} samples did not converge, "
            f"so their gradients are inexact: the worst relative residual is "
            f"{float(self.residual[worst]):.1e}, tolerance {self.tolerance:.1e}. Raise "
            "max_iterations or the tolerance of the gradient rule, bound the norm of W "
            "(norm='bound' for operators of this package), or use a rule without a backward solve "
            "(gradient='phantom')"
        )


class KrylovRun(NamedTuple):
    """Result of one run of a method on A d = r."""

    correction: Tensor
    iterations: Tensor
    evaluations: int
    broken: Tensor
    """Rows at which the method broke down."""
    norm: Tensor | None = None
    """Norm of the recursively updated residual r − A d, if the method computes it."""


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

    The recursively updated residual of a method drifts from the true residual by about
    epsilon ‖u‖ per product. Where that is not small compared with the goal, the residual is
    evaluated after a run. Rows are scaled so that their squares neither overflow nor underflow.

    Args:
        method: Name of the method in the result.
        run: Called with r, the norm to reach in each row, and the number of products with A that
            remain. It may overwrite r, which is zero in finished rows.
        operator: v ↦ A v.
        rhs: g, shape (rows, size).
        start: Start of u; by default zero.
        tolerance: Relative residual to reach, raised to `epsilon` if it is smaller.
        max_iterations: Largest number of products with A.
        epsilon: Relative precision of the products; by default the machine epsilon of `rhs`. If u
            is much larger than g, a residual of about epsilon ‖u‖ remains, which counts as
            converged up to ten times the tolerance.
        relative_to: Vectors to whose norm residuals are relative; by default g.
    """
    check_below_one(tolerance=tolerance)
    check_at_least_one(max_iterations=max_iterations)
    whole = rhs if relative_to is None else relative_to
    unit = row_units(whole)
    if unit is not None:
        rhs, whole, start = rhs / unit, whole / unit, None if start is None else start / unit
    scale = row_norms(whole)
    norm = scale if relative_to is None else row_norms(rhs)
    # None stands for zero and saves memory.
    value: Tensor | None = None
    residual, evaluations = rhs, 0
    if start is not None:
        after, evaluations = rhs - operator(start), 1
        # Here and below, a NaN is not an improvement: it compares false.
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
    aim, remaining = (1 - MAX_DRIFT) * goal, max_iterations
    while remaining > 0 and bool(going.any()):
        result = run(torch.where(going[:, None], residual, 0.0), aim, remaining)
        if value is None and result.norm is not None:
            size = scale + row_norms(result.correction)
            drift = epsilon * result.iterations * size
            trusted = (result.norm <= aim) & (drift <= MAX_DRIFT * goal)
            if bool((trusted | ~going).all()):
                value, norm = result.correction, torch.where(going, result.norm, norm)
                iterations, evaluations = result.iterations, result.evaluations
                converged = converged | going
                break
        candidate = result.correction if value is None else value + result.correction
        after = rhs - operator(candidate)
        size = row_norms(after)
        better = going & (size < norm)
        value = torch.where(better[:, None], candidate, 0.0 if value is None else value)
        residual = torch.where(better[:, None], after, residual)
        progress = better & (size < MIN_RESIDUAL_REDUCTION * norm)
        norm = torch.where(better, size, norm)
        iterations += result.iterations
        evaluations += result.evaluations + 1
        remaining -= result.evaluations
        converged = norm <= (ROUNDING_FACTOR * epsilon * row_norms(value)).clamp(goal, 10 * goal)
        broken = broken | (going & result.broken & ~converged)
        going = progress & ~converged & ~broken
        aim = goal / 2  # the last run missed the goal by rounding: aim lower
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
