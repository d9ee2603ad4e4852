"""The solver that suits what is known of the map."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import batch_size, map_state
from equilibria.solvers.accelerated import Accelerated
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.base import Solver
from equilibria.solvers.minimize.quasi_newton import PAIRS
from equilibria.solvers.picard import Picard
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.solution import Solution, Status

STRONG_CONTRACTION = 0.35
"""With a proven factor below this, plain steps need no help: 1e-4 takes nine at the most."""

SMALL_STATE = 4096
"""Numbers a sample below which a step of the map costs no more than Anderson's bookkeeping, and
next to nothing to remember one more of them."""

FEW_DIGITS = 1e-4
"""Looser tolerances than this take few steps: it matters most then what each of them costs."""

LONG_MEMORY = 5
"""Points that are mixed where states are small."""

LONGER_STEPS = 1.3
"""Times those of the map, where it is a gradient step on an objective of curvature 1 at the most:
steps of up to 2 are stable there, and these save one evaluation in ten or twenty."""

PATIENCE = 10
"""Iterations without progress after which a sample with a hidden objective descends on it."""

LONG_BUDGET = 50
"""Who allows fewer iterations than this wants to be done by then: no descent follows."""


@dataclass(frozen=True, kw_only=True)
class Auto(Anderson):
    """Picks by what the cell states; Anderson's method where nothing speaks for another.

    A contraction proven to be strong: Picard. A symmetric Jacobian without negative eigenvalues (a
    hidden objective with a concave energy): Anderson's method with longer steps; where states are
    small with a longer memory, or, for a loose tolerance, accelerated gradient descent, which costs
    two vectors and no linear algebra. `Solution.solver` says which one it was. The thresholds come
    from the tables in docs/benchmarks.md; `equilibria tune` measures your own model.

    A sample whose residual stops falling, because the map does not contract, goes on by `Descent`
    if there is a hidden objective: a convex one is minimized in any case. It begins with what the
    plain steps have seen. That may cost many times `max_iterations`; below fifty of them there is
    no descent.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)), solver="auto")
        >>> layer.solve(torch.ones(1, 2)).solver  # a constant map contracts strongly
        'Picard'
    """

    @property
    def method(self) -> str:
        return Anderson.__name__

    def choose(self, problem: FixedPointProblem) -> Solver[Any] | None:
        """The solver for this problem, or None for Anderson's method."""
        limits: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Solver)}
        limits["patience"] = self.patience_with(problem)
        if problem.contraction is not None and problem.contraction <= STRONG_CONTRACTION:
            return Picard(**limits)
        small = problem.packing.size <= SMALL_STATE
        if problem.monotone and small and self.tolerance > FEW_DIGITS:
            return Accelerated(**limits)
        if problem.monotone and self.damping == 1:
            own = {one.name: getattr(self, one.name) for one in fields(Anderson)}
            memory = max(self.memory, LONG_MEMORY) if small else self.memory
            return Anderson(**{**own, **limits, "damping": LONGER_STEPS, "memory": memory})
        return None

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        chosen = self.choose(problem)
        run = super().run if chosen is None else chosen.run
        if not self._may_descend(problem):
            return run(problem, trace=trace)
        watched = WatchedProblem(problem)
        solution = run(watched.problem, trace=trace)
        rows = (solution.status != int(Status.CONVERGED)).nonzero().squeeze(1)
        if not len(rows):
            return solution
        return self._descend(problem, solution, rows, trace, watched.points(rows))

    def patience_with(self, problem: FixedPointProblem) -> int | None:
        return PATIENCE if self._may_descend(problem) else self.patience

    def _may_descend(self, problem: FixedPointProblem) -> bool:
        long = self.max_iterations >= LONG_BUDGET and self.patience is None
        return long and problem.potential is not None

    def _descend(
        self,
        problem: FixedPointProblem,
        first: Solution,
        rows: Tensor,
        trace: bool | Literal["states"],
        visited: list[tuple[Tensor, Tensor]],
    ) -> Solution:
        """The solution, with these rows solved to their end by `Descent`."""
        packed = problem.pack(first.state)
        rest = problem.in_context(first.context).keep(rows).started_at(problem.unpack(packed[rows]))
        second = self.minimizer.run(rest, trace=trace, visited=visited)
        return first.continued(problem, rows, second)


class WatchedProblem:
    """A problem whose evaluations are remembered as far as a descent can go on from them.

    That is y and d = −∇E(y) where the map is σ(d), the states are small, and until samples are
    dropped: of these the last, as many as a quasi-Newton step remembers. `step` computes what the
    cell's own step computes. Monotone maps, which rarely need a descent, are not watched: to keep
    what each step has computed takes a tenth of the time of a solve, and a quarter of a long one.
    """

    def __init__(self, problem: FixedPointProblem) -> None:
        self.problem = problem
        self.seen: deque[tuple[State, State]] = deque(maxlen=PAIRS + 1)
        self.samples = batch_size(problem.start)
        potential = problem.potential
        if (
            potential is not None
            and potential.is_plain
            and not problem.records_step
            and problem.refresh is None
            and not problem.monotone
            and problem.packing.size <= SMALL_STATE
            and not torch.is_autocast_enabled(problem.device_type)
        ):
            self.potential = potential
            self.problem = problem.with_step(self.step)

    def step(self, state: State, context: Context) -> State:
        descent = self.potential.energy.descent(state, context)
        if batch_size(state) == self.samples:
            self.seen.append((state, descent))
        return map_state(self.potential.activation, descent)

    def points(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What is known of these samples."""
        found = [(self.problem.pack(y), self.problem.pack(d)) for y, d in self.seen]
        return [(y[rows], d[rows]) for y, d in found]
