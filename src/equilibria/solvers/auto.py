"""Automatic choice of a solver from the known properties of the map."""

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
"""Largest contraction factor at which plain steps are the best choice: a tolerance of 1e-4 takes at
most nine."""

SMALL_STATE = 4096
"""Largest state size per sample at which a step of the map costs no more than Anderson's
bookkeeping, and storing one more point costs little."""

LOOSE_TOLERANCE = 1e-4
"""Tolerances above this need few iterations, so the cost per iteration matters most."""

SMALL_STATE_MEMORY = 5
"""Smallest number of mixed points for small states."""

EXTENDED_STEP = 1.3
"""Step size, in units of the map's step, if the map is a gradient step on an objective of curvature
at most 1. Steps of up to 2 are stable there; this one saves 5 to 10 % of the evaluations."""

PATIENCE = 10
"""Iterations without progress after which a sample with a hidden objective descends on it."""

MIN_DESCENT_ITERATIONS = 50
"""Smallest `max_iterations` at which a descent may follow; fewer request a short solve."""


@dataclass(frozen=True, kw_only=True)
class Auto(Anderson):
    """Automatic choice of the solver from the declared properties of the map.

    A layer defined by an energy has a hidden objective, which its output minimizes.

    | property of the map | solver |
    |---|---|
    | proven strong contraction | `Picard` |
    | monotone (see `FixedPointProblem`), small state, loose tolerance | `Accelerated` |
    | monotone | `Anderson` with longer steps |
    | other | `Anderson` |

    `Solution.solver` names the choice. The thresholds come from the tables in docs/benchmarks.md;
    `equilibria tune` measures your own model.

    If there is a hidden objective, a sample whose residual stops falling continues with `Descent`,
    which always minimizes a convex objective. It starts from the iterates computed so far and may
    cost many times `max_iterations`. Descent needs `max_iterations >= 50`.

    Args:
        memory, ridge, cap, damping, restart_growth: See `Anderson`. With a `damping` other than 1,
            monotone maps use it in place of the longer steps.
        tolerance, max_iterations, stop, check_minimum: See `Method`.
        patience, check_every, drop_share, iterate: See `Solver`. Setting `patience` disables the
            descent.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)), solver="auto")
        >>> layer.solve(torch.ones(1, 2)).solver  # a constant map contracts strongly
        'Picard'
    """

    @property
    def method(self) -> str:
        return Anderson.__name__

    def choose(self, problem: FixedPointProblem) -> Solver[Any] | None:
        """Return the solver for a problem, or None for Anderson's method with these settings.

        Args:
            problem: Problem to solve.
        """
        limits: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Solver)}
        limits["patience"] = self.patience_with(problem)
        if problem.contraction is not None and problem.contraction <= STRONG_CONTRACTION:
            return Picard(**limits)
        small = problem.packing.size <= SMALL_STATE
        if problem.monotone and small and self.tolerance > LOOSE_TOLERANCE:
            return Accelerated(**limits)
        if problem.monotone and self.damping == 1:
            options = {f.name: getattr(self, f.name) for f in fields(Anderson)}
            memory = max(self.memory, SMALL_STATE_MEMORY) if small else self.memory
            return Anderson(**{**options, **limits, "damping": EXTENDED_STEP, "memory": memory})
        return None

    def run(
        self, problem: FixedPointProblem, *, trace: bool | Literal["states"] = False
    ) -> Solution:
        chosen = self.choose(problem)
        run = super().run if chosen is None else chosen.run
        if not self._may_descend(problem):
            return run(problem, trace=trace)
        recorded = RecordedProblem(problem)
        solution = run(recorded.problem, trace=trace)
        rows = (solution.status != int(Status.CONVERGED)).nonzero().squeeze(1)
        if not len(rows):
            return solution
        return self._descend(problem, solution, rows, trace, recorded.points(rows))

    def patience_with(self, problem: FixedPointProblem) -> int | None:
        return PATIENCE if self._may_descend(problem) else self.patience

    def is_steady_at(self, iteration: int, problem: FixedPointProblem) -> bool:
        # On linear contracting maps, the residual of Anderson's method falls in every iteration. A
        # sample that is given up wrongly, because the map is not linear, only descends too early.
        may_be_wrong = self._may_descend(problem) and self.damping <= 1
        return super().is_steady_at(iteration, problem) or (iteration > 2 and may_be_wrong)

    def _may_descend(self, problem: FixedPointProblem) -> bool:
        enabled = self.max_iterations >= MIN_DESCENT_ITERATIONS and self.patience is None
        return enabled and problem.potential is not None

    def _descend(
        self,
        problem: FixedPointProblem,
        first: Solution,
        rows: Tensor,
        trace: bool | Literal["states"],
        visited: list[tuple[Tensor, Tensor]],
    ) -> Solution:
        """Return the solution with these rows continued by `Descent`."""
        packed = problem.pack(first.state)
        rest = problem.in_context(first.context).keep(rows).started_at(problem.unpack(packed[rows]))
        second = self.minimizer.run(rest, trace=trace, visited=visited)
        return first.continued(problem, rows, second)


class RecordedProblem:
    """Fixed-point problem that records its last evaluations, from which a descent can start.

    For a map T(y) = σ(−∇E(y)) of an activation σ and an energy E, it records y and −∇E(y) of as
    many evaluations as the quasi-Newton method stores, until samples are dropped from the batch.
    Nothing is recorded for other maps, for large states (memory), and for monotone maps: they
    rarely need a descent, and recording takes a tenth to a quarter of the time of a solve.

    Args:
        problem: The problem to solve. The attribute `problem` is the one to pass to the solver.
    """

    def __init__(self, problem: FixedPointProblem) -> None:
        self.problem = problem
        self.evaluations: deque[tuple[State, State]] = deque(maxlen=PAIRS + 1)
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
            self.evaluations.append((state, descent))
        return map_state(self.potential.activation, descent)

    def points(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the recorded pairs (y, d) of these samples, packed."""
        packed = [(self.problem.pack(y), self.problem.pack(d)) for y, d in self.evaluations]
        return [(y[rows], d[rows]) for y, d in packed]
