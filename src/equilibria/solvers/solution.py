"""What a solve found, sample by sample, and what to do where it did not converge."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from equilibria.context import Context, State


class Status(IntEnum):
    """How the solve of one sample ended.

    Examples:
        >>> solution = eq.EquilibriumLayer(eq.Input(torch.eye(2))).solve(torch.ones(1, 2))
        >>> eq.Status(int(solution.status[0])).name
        'CONVERGED'
    """

    CONVERGED = 0
    OUT_OF_ITERATIONS = 1
    DIVERGED = 2
    STALLED = 3
    """A descent ended before its budget: the objective falls no more, and no rule was met."""
    STATIONARY = 4
    """The residual reached the tolerance; whether the point is a minimum of the objective, which
    is not known to be convex, was not tested (`check_minimum=False`)."""


TOO_SMALL = (
    "the numbers are too small for their type: scale the input, or compute in a wider type "
    "(model.double())"
)


FAR = 10
"""A residual above this many times the tolerance is far from convergence."""


class Packs(Protocol):
    """What turns states into rows of one buffer and back."""

    def pack(self, state: State) -> Tensor: ...
    def unpack(self, flat: Tensor) -> State: ...


class ConvergenceWarning(UserWarning):
    """Some samples did not reach the tolerance: their result is only the best that was seen.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     z = eq.fixed_point(lambda z, x: z + x, torch.ones(1, 2))  # there is none
        >>> caught[0].category.__name__
        'ConvergenceWarning'
    """


class ConvergenceError(RuntimeError):
    """Some samples did not reach the tolerance, and `strict=True` asked for an error.

    Examples:
        >>> layer = eq.EquilibriumLayer(lambda z, x: z + x, strict=True)  # has no fixed point
        >>> try:
        ...     layer(torch.ones(1, 2))
        ... except eq.ConvergenceError as error:
        ...     print(str(error)[:44])
        1 of 1 samples (100%) did not converge; samp
    """


@dataclass(frozen=True)
class Trace:
    """What happened at each iteration.

    `residual` has shape `(iterations, problems)` and is NaN from where a problem had already
    stopped: nothing is made up. `states`, if asked for, holds T(y) of every iteration, and for a
    problem that has stopped its answer.

    Examples:
        >>> layer = eq.EquilibriumLayer(lambda z, x: z / 2 + x, solver="picard", tolerance=1e-2)
        >>> with eq.solving(layer, record="iterates") as record:
        ...     z = layer(torch.ones(1, 1))
        >>> record.solutions[0].trace.residual.flatten()[:3]
        tensor([1.0000, 0.3333, 0.1429])
    """

    residual: Tensor
    states: Sequence[State] | None = None


@dataclass(frozen=True)
class Solution:
    """The result of a fixed-point solve.

    Every per-problem tensor has one entry a sample, or a single one where the samples of the batch
    are coupled. `state` is always an output of the map (T of the best point seen), never a mixture
    of iterates and never NaN; it is the start where not even the first evaluation was finite.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)))
        >>> solution = layer.solve(torch.ones(3, 2))
        >>> solution.converged, solution.summary()
        (tensor([True, True, True]), 'all 3 samples converged to 1.0e-04')
    """

    state: State
    status: Tensor
    residual: Tensor
    """Relative residual ‖T(y) − y‖ / ‖T(y)‖ at the point y whose image `state` is."""
    absolute_residual: Tensor
    """‖T(y) − y‖ at that point: with a contraction bound q, ‖state − y*‖ ≤ q/(1−q) times it."""
    iterations: Tensor
    evaluations: int
    """Calls of the map; each evaluates all samples that are still in the batch. Where that is
    solved in blocks: of the block that needed most."""
    sample_evaluations: int
    """Evaluations of the map counted per sample: what the solve cost."""
    tolerance: float
    solver: str
    """The class of the solver that found it (what "auto" chose)."""
    epsilon: float
    """The relative precision of the numbers the map was computed in."""
    context: Context
    """The context the last map was evaluated in (it differs from the first after a `refresh`)."""
    trace: Trace | None = None
    remedy: str = ""
    """What to do where a solve failed, if the map's owner knows."""
    diagnose: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    """Computes a remedy from the state and the context, where the map's owner can."""

    @property
    def diagnosis(self) -> str:
        """What to do about the failure, computed when it is first read."""
        return (self.diagnose() if self.diagnose is not None else "") or self.remedy

    @property
    def converged(self) -> Tensor:
        """For each sample whether its residual reached the tolerance."""
        return (self.status == Status.CONVERGED) | (self.status == Status.STATIONARY)

    @property
    def is_unusable(self) -> Tensor:
        """For each sample whether its state says little about the equilibrium.

        That is so where the solve diverged, stalled, or ended at a residual above ten times the
        tolerance. A sample that ran out of iterations close to its tolerance is usable: this is
        ordinary in training.
        """
        near = self.residual <= FAR * self.tolerance
        ended_early = (self.status == Status.DIVERGED) | (self.status == Status.STALLED)
        return ended_early | ~(self.converged | near)

    @property
    def share_converged(self) -> float:
        """The share of problems that converged; 1 for an empty batch."""
        return float(self.converged.float().mean()) if self.status.numel() else 1.0

    @property
    def _severity(self) -> Tensor:
        """0 for a sample that converged; larger the worse a sample failed."""
        stalled, diverged = self.status == Status.STALLED, self.status == Status.DIVERGED
        return (~self.converged).int() + self.is_unusable.int() + stalled.int() + 2 * diverged.int()

    @cached_property
    def worst_status(self) -> Status:
        """How the sample that failed worst ended; `CONVERGED` if none failed."""
        if not bool(self.status.any()) or bool(self.converged.all()):
            return Status.CONVERGED
        return Status(int(self.status[int(torch.argmax(self._severity))]))

    def continued(self, problem: Packs, rows: Tensor, later: Solution) -> Solution:
        """Return this solution with some samples taken from a solve that went on from it.

        Args:
            problem: What packs and unpacks states of the whole batch.
            rows: The samples that went on.
            later: The solution of these samples.
        """
        state = problem.pack(self.state)

        def merged(name: str) -> Tensor:
            before: Tensor = getattr(self, name)
            return before.index_copy(0, rows, getattr(later, name))

        return replace(
            self,
            state=problem.unpack(state.index_copy(0, rows, problem.pack(later.state))),
            status=merged("status"),
            residual=merged("residual"),
            absolute_residual=merged("absolute_residual"),
            iterations=self.iterations.index_add(0, rows, later.iterations),
            evaluations=self.evaluations + later.evaluations,
            sample_evaluations=self.sample_evaluations + later.sample_evaluations,
            solver=self.solver
            if self.solver.endswith(f"then {later.solver}")
            else f"{self.solver}, then {later.solver}",
            trace=self._continued_trace(problem, rows, later),
        )

    def _continued_trace(self, problem: Packs, rows: Tensor, later: Solution) -> Trace | None:
        before, after = self.trace, later.trace
        if before is None or after is None:
            return None
        nothing = before.residual.new_full((len(after.residual), len(self.status)), torch.nan)
        residual = torch.cat([before.residual, nothing.index_copy(1, rows, after.residual)])
        if before.states is None or after.states is None:
            return Trace(residual)
        state = problem.pack(self.state)
        states = (problem.unpack(state.index_copy(0, rows, problem.pack(s))) for s in after.states)
        return Trace(residual, [*before.states, *states])

    def explained(self) -> Solution:
        """Return the same with its diagnosis as the remedy, which copies and pickles then hold."""
        return replace(self, remedy=self.diagnosis, diagnose=None)

    def facts(self) -> Solution:
        """Return the same without state, context and trace, which are as large as the problem.

        The result computes a diagnosis only as long as this solution is alive.
        """
        diagnose = self.diagnose
        if diagnose is not None and not isinstance(diagnose, _WeakDiagnosis):
            diagnose = _WeakDiagnosis(diagnose)
        nothing = self.residual.new_empty(0)
        return replace(self, state=nothing, context=Context(), trace=None, diagnose=diagnose)

    def message(self, problem: int) -> str:
        """A sentence on how one sample ended, with the remedy."""
        small = float(self.absolute_residual[problem]) < torch.finfo(self.residual.dtype).tiny
        return describe(
            Status(int(self.status[problem])),
            residual=float(self.residual[problem]),
            iterations=int(self.iterations[problem]),
            tolerance=self.tolerance,
            epsilon=self.epsilon,
            remedy=TOO_SMALL if small else self.diagnosis,
        )

    def summary(self) -> str:
        """One line on all samples, with the remedy for the worst of them."""
        total = self.status.numel()
        failed = int((~self.converged).sum())
        if failed == 0:
            # A stopping criterion of its own may be content with more than the tolerance.
            largest = max(float(self.residual.max()), self.tolerance) if total else self.tolerance
            stationary = bool((self.status == Status.STATIONARY).any())
            verb = "are stationary" if stationary else "converged"
            return f"all {total} samples {verb} to {largest:.1e}"
        worst = int(torch.argmax(self._severity))
        return (
            f"{failed} of {total} samples ({failed / total:.0%}) did not converge; "
            f"sample {worst}: {self.message(worst)}"
        )

    def raise_if_failed(self) -> Solution:
        """Raise `ConvergenceError` unless every sample converged."""
        if not bool(self.converged.all()):
            raise ConvergenceError(self.summary())
        return self


class _WeakDiagnosis:
    """A diagnosis held by a full solution; empty once that solution is deleted."""

    def __init__(self, diagnose: Callable[[], str]) -> None:
        self._held: weakref.ref[Callable[[], str]] | None = weakref.ref(diagnose)

    def __call__(self) -> str:
        diagnose = None if self._held is None else self._held()
        return "" if diagnose is None else diagnose()

    def __getstate__(self) -> dict[str, object]:
        # A reference cannot be pickled.
        return {"_held": None}


def describe(
    status: Status,
    *,
    residual: float,
    iterations: int,
    tolerance: float,
    epsilon: float,
    remedy: str = "",
) -> str:
    """The sentence that belongs to a status."""
    if status is Status.CONVERGED:
        return f"converged to a relative residual of {residual:.1e} in {iterations} iterations"
    if status is Status.STATIONARY:
        return (
            f"stationary to a relative residual of {residual:.1e} after {iterations} iterations; "
            "whether that is a minimum was not tested (check_minimum=False)"
        )
    if status is Status.OUT_OF_ITERATIONS:
        usual = "raise max_iterations or the tolerance, or bound the norm of W (norm='bound')"
        remedy = (
            "the tolerance is below the precision of the numbers: raise it, or compute in a wider "
            "type (model.double())"
            if tolerance < 10 * epsilon
            else remedy or usual
        )
        return (
            f"out of iterations: relative residual {residual:.1e} after {iterations}, "
            f"tolerance {tolerance:.1e}; {remedy}"
        )
    if status is Status.STALLED:
        if residual <= tolerance:
            remedy = "the point is stationary, and the stopping rule of the solver is not met there"
        elif residual <= math.sqrt(epsilon):
            remedy = "rounding hides what is left to fall: raise the tolerance"
        elif not remedy:
            remedy = "it has a kink there: smooth the term that has one (a sign, a norm, a maximum)"
        return (
            f"stalled after {iterations} iterations: the objective has stopped falling at a "
            f"relative residual of {residual:.1e}, tolerance {tolerance:.1e}; {remedy}"
        )
    remedy = remedy or "bound the norm of W (norm='bound') or damp the iteration"
    return (
        f"diverged after {iterations} iterations: the input holds NaN or Inf, or the map is not "
        f"contractive; check the input, and {remedy}"
    )
