"""Settings of a search over inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from equilibria.registry import check_values

SOLVE_TOLERANCE_FACTOR = 0.1
"""Tolerance of the solves for z and μ where sweeps diverge, relative to that of the search."""
MAX_SOLVE_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of `optimize_input` that most calls leave at their defaults.

    In the following, x is the optimized input, z its equilibrium, and μ the adjoint.

    Args:
        step_size: Step size α. With `normalize` it is the length of the first step, by default 8
            times the radius of the ball; the length falls to a twentieth. Otherwise it multiplies
            the gradient; for Adam it is the learning rate. By default (None) "secant" takes
            quasi-Newton steps if x is unconstrained, and other steps are the gradient divided by
            the observed curvature. Both are independent of the unit of the loss.
        normalize: Divide the gradient by its 2-norm. Use it for attacks, whose optimum lies on the
            boundary of the ball. Such steps circle around an optimum inside.
        sweeps: Updates of (z, μ) per step of x, unless the engine sets them; by default 1 with
            `normalize` and 3 without.
        tolerance: Relative residual of z, μ and x at which a problem has converged.
        check_tolerance: Tolerance of the solves for the true losses; by default 1e-6, or 1e-10 in
            float64.
        verify: Solve for the equilibria at the start and at the end, report the true losses, and
            never return an input that is worse than the start. False saves these solves: the
            result is the last x ("official": the x of the lowest loss), and its losses are
            evaluated at the z of the search.
        polish: Solve for μ at the result, which `optimal_value` needs. False returns the μ of the
            search.
        visit: Keep one of the iterates (x, z), drawn by torch's global generator, as
            `InputResult.visited`. None keeps it if a `solving` block around the call records
            equilibria of the model.

    Examples:
        >>> eq.inputs.SearchSettings(normalize=True, tolerance=1e-3).polish
        True
    """

    step_size: float | None = None
    normalize: bool = False
    sweeps: int | None = None
    tolerance: float = 1e-4
    check_tolerance: float | None = None
    verify: bool = True
    polish: bool = True
    visit: bool | None = None

    def __post_init__(self) -> None:
        check_values(
            self,
            at_least_one=("sweeps",),
            positive=("step_size",),
            tolerances=("tolerance", "check_tolerance"),
        )

    def tight(self, dtype: torch.dtype) -> float:
        """Return the tolerance of the solves for true losses.

        Args:
            dtype: Type of the state.
        """
        return self.check_tolerance or (1e-10 if dtype == torch.float64 else 1e-6)

    def solve_tolerance(self, dtype: torch.dtype) -> float:
        """Return the tolerance of solves for equilibrium and adjoint where updates diverge.

        Args:
            dtype: Type of the state.
        """
        largest = min(SOLVE_TOLERANCE_FACTOR * self.tolerance, MAX_SOLVE_TOLERANCE)
        return max(largest, self.tight(dtype))
