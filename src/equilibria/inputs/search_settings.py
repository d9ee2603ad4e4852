"""How a search over inputs moves, when it stops, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from equilibria.registry import check_values

SOLVED_SHARE, LOOSEST_SOLVE = 0.1, 1e-3
"""Tolerance of the solves for z and μ where sweeps diverge: as a share of that of the search, and
at most."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of `optimize_input` that most calls leave at their defaults.

    Args:
        step_size: Step size α. With `normalize` it is the length of the first step, by default 8
            times the radius of the ball; the length falls to a twentieth. Otherwise it is a factor
            of the gradient. By default (None) "secant" takes quasi-Newton steps where nothing
            constrains x; every other step is one over the curvature seen so far, which makes the
            result independent of the unit of the loss. For Adam it is the learning rate.
        normalize: Divide the gradient by its 2-norm. Right for attacks, where the optimum lies on
            the ball; wrong for an optimum inside, which such steps can only circle.
        sweeps: Updates of (z, μ) per step of x, unless the engine sets its own; by default 1 with
            `normalize` and 3 without.
        tolerance: Relative residual of z, μ and x at which a problem has converged.
        check_tolerance: Tolerance of the solves for the true losses; by default 1e-6, or 1e-10 in
            float64.
        verify: Solve tightly at the start and at the end, report true losses, and never return an
            input that is worse than the start. False saves these solves where only x matters: the
            result is then the last x ("official": the one of the lowest loss), and its losses are
            those at the z of the search.
        polish: Solve for μ at the result, which `optimal_value` needs; False returns the μ of the
            search.
        visit: Keep one of the iterates (x, z), drawn by torch's global generator, as `visited`.
            None keeps it if a `solving` block around the call records equilibria of the model.

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
        """Return the tolerance of the solves for true losses of a state of this type."""
        return self.check_tolerance or (1e-10 if dtype == torch.float64 else 1e-6)

    def solve_tolerance(self, dtype: torch.dtype) -> float:
        """Return the tolerance of the solves for z and μ where sweeps diverge."""
        return max(min(SOLVED_SHARE * self.tolerance, LOOSEST_SOLVE), self.tight(dtype))
