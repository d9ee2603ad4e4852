"""The solver that suits what is known of the map."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from equilibria.solvers.accelerated import Accelerated
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Solver
from equilibria.solvers.picard import Picard
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution

STRONG_CONTRACTION = 0.35
"""With a proven factor below this, plain steps need no help: 1e-4 takes nine at the most."""

SMALL_STATE = 4096
"""Numbers a sample below which a step of the map costs less than Anderson's bookkeeping."""


@dataclass(frozen=True, kw_only=True)
class Auto(Anderson):
    """Picks by what the cell states; Anderson's method where nothing speaks for another.

    A contraction proven to be strong: Picard. A symmetric Jacobian without negative eigenvalues (a
    hidden objective with a concave energy) and a small state: accelerated gradient descent, which
    costs two vectors and no linear algebra. `Solution.solver` says which one it was. The thresholds
    come from the table in docs/benchmarks.md; `equilibria tune` measures your own model.
    """

    @property
    def method(self) -> str:
        return Anderson.__name__

    def choose(self, problem: FixedPointProblem) -> Solver[Any] | None:
        """The solver for this problem, or None for Anderson's method."""
        limits: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Solver)}
        if problem.contraction is not None and problem.contraction <= STRONG_CONTRACTION:
            return Picard(**limits)
        if problem.monotone and problem.packing.size <= SMALL_STATE:
            return Accelerated(**limits)
        return None

    def solve(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        chosen = self.choose(problem)
        solve = super().solve if chosen is None else chosen.solve
        return solve(problem, trace=trace)
