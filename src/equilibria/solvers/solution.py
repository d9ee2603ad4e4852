"""Result of a solve: state, status and residual of every sample, with a remedy for failures."""

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
    """Status of one sample at the end of a solve.

    Examples:
        >>> solution = eq.EquilibriumLayer(eq.Input(torch.eye(2))).solve(torch.ones(1, 2))
        >>> eq.Status(int(solution.status[0])).name
        'CONVERGED'
    """

    CONVERGED = 0
    OUT_OF_ITERATIONS = 1
    DIVERGED = 2
    STALLED = 3
    """A descent ended early: the objective stopped falling before the stopping rule was met."""
    STATIONARY = 4
    """The residual reached the tolerance, but the objective is not known to be convex, and the
    point was not tested for a minimum (`check_minimum=False`)."""


TOO_SMALL = (
    "the numbers are too small for their type: scale the input, or compute in a wider type "
    "(model.double())"
)

USUAL_REMEDY = (
    "bound the norm of W (norm='bound' for operators of this package), or damp the iteration "
    "(solver={'name': 'picard', 'damping': 0.5})"
)
"""Advice for a map that is not known to be a contraction."""

USABLE_TOLERANCES = 10
"""Largest residual of a usable state, in units of the tolerance."""


class Packs(Protocol):
    """Object that packs states into rows of one buffer, and back."""

    def pack(self, state: State) -> Tensor: ...
    def unpack(self, flat: Tensor) -> State: ...


class ConvergenceWarning(UserWarning):
    """Warning that some samples did not reach the tolerance; their result is the best iterate.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     z = eq.fixed_point(lambda z, x: z + x, torch.ones(1, 2))  # has no fixed point
        >>> caught[0].category.__name__
        'ConvergenceWarning'
    """


class ConvergenceError(RuntimeError):
    """Error with `strict=True`: some samples did not reach the tolerance.

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
    """Residuals, and optionally states, of all iterations of a solve.

    Attributes:
        residual: Relative residuals, shape (iterations, problems); NaN after a problem stopped.
        states: T(y) of every iteration, if requested; after a problem stopped, its result.

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
    """Result of a fixed-point solve.

    Per-sample tensors have one entry per sample, or a single entry if the samples of the batch are
    coupled. The state of an iterative solver is T(y) for the best point y (the last one, with
    `iterate="last"`), never a mixture of iterates and never NaN. If the first evaluation was not
    finite, it is the start.

    Attributes:
        state: State of every sample.
        status: `Status` of every sample.
        residual: Relative residual ‖T(y) − y‖ / ‖T(y)‖ at the point y with T(y) = `state`.
        absolute_residual: ‖T(y) − y‖ at that point. With a contraction bound q,
            ‖state − y*‖ ≤ q/(1−q) times this value.
        iterations: Number of iterations of every sample.
        evaluations: Number of calls of the map, each on all samples that are still in the batch.
            If the batch was solved in blocks, the largest number of any block.
        sample_evaluations: Number of evaluations counted per sample: the cost of the solve.
        tolerance: Relative residual at which a sample has converged.
        solver: Class of the solver that computed the result ("auto" chooses one).
        epsilon: Machine epsilon of the type in which the map was computed.
        context: Tensors that the map read besides the state in the last evaluation.
        trace: Residuals of all iterations, if they were recorded.
        agreement: Share of the starts of each sample that ended at its state, shape (B,), if it was
            solved from several starts; else None.
        remedy: Advice for failed solves.
        diagnose: Computes a more specific remedy, or an empty string.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)))
        >>> solution = layer.solve(torch.ones(3, 2))
        >>> solution.converged, solution.summary()
        (tensor([True, True, True]), 'all 3 samples converged to 1.0e-04')
    """

    state: State
    status: Tensor
    residual: Tensor
    absolute_residual: Tensor
    iterations: Tensor
    evaluations: int
    sample_evaluations: int
    tolerance: float
    solver: str
    epsilon: float
    context: Context
    trace: Trace | None = None
    agreement: Tensor | None = None
    remedy: str = ""
    diagnose: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @property
    def diagnosis(self) -> str:
        """Remedy for the failure: the result of `diagnose`, else `remedy`."""
        return (self.diagnose() if self.diagnose is not None else "") or self.remedy

    @property
    def converged(self) -> Tensor:
        """Whether each sample reached the tolerance, shape (B,)."""
        return (self.status == Status.CONVERGED) | (self.status == Status.STATIONARY)

    @property
    def is_unusable(self) -> Tensor:
        """Whether the state of each sample may be far from its equilibrium, shape (B,).

        True if the solve diverged, stalled, or ended at a residual above ten times the tolerance.
        A sample that ran out of iterations close to the tolerance is usable; this is common in
        training.
        """
        near = self.residual <= USABLE_TOLERANCES * self.tolerance
        ended_early = (self.status == Status.DIVERGED) | (self.status == Status.STALLED)
        return ended_early | ~(self.converged | near)

    @property
    def share_converged(self) -> float:
        """Share of samples that converged; 1 for an empty batch."""
        return float(self.converged.float().mean()) if self.status.numel() else 1.0

    @property
    def _severity(self) -> Tensor:
        """0 for converged samples, larger for worse failures."""
        stalled, diverged = self.status == Status.STALLED, self.status == Status.DIVERGED
        return (~self.converged).int() + self.is_unusable.int() + stalled.int() + 2 * diverged.int()

    @cached_property
    def worst_status(self) -> Status:
        """Status of the sample that failed worst; `CONVERGED` if none failed."""
        if not bool(self.status.any()) or bool(self.converged.all()):
            return Status.CONVERGED
        return Status(int(self.status[int(torch.argmax(self._severity))]))

    def continued(self, problem: Packs, rows: Tensor, later: Solution) -> Solution:
        """Return this solution with some samples replaced by those of a solve that continued it.

        Args:
            problem: Packs and unpacks states of the whole batch.
            rows: Indices of the continued samples.
            later: Solution of these samples.
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
        """Return a copy whose remedy is the diagnosis, so that copies and pickles keep it."""
        return replace(self, remedy=self.diagnosis, diagnose=None)

    def facts(self) -> Solution:
        """Return a copy without state, context and trace, which are as large as the problem.

        The copy can compute a diagnosis only as long as this solution exists.
        """
        diagnose = self.diagnose
        if diagnose is not None and not isinstance(diagnose, _WeakDiagnosis):
            diagnose = _WeakDiagnosis(diagnose)
        nothing = self.residual.new_empty(0)
        return replace(self, state=nothing, context=Context(), trace=None, diagnose=diagnose)

    def message(self, problem: int) -> str:
        """Describe in one sentence how one sample ended, with the remedy.

        Args:
            problem: Index of the sample.
        """
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
        """Describe in one line how all samples ended, with the remedy for the worst."""
        total = self.status.numel()
        failed = int((~self.converged).sum())
        if failed == 0:
            # A custom stopping criterion may accept a residual above the tolerance.
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
        """Return this solution if every sample converged.

        Raises:
            ConvergenceError: If some sample did not converge.
        """
        if not bool(self.converged.all()):
            raise ConvergenceError(self.summary())
        return self


class _WeakDiagnosis:
    """Weak reference to the diagnosis of a full solution; empty once that solution is deleted."""

    def __init__(self, diagnose: Callable[[], str]) -> None:
        self._held: weakref.ref[Callable[[], str]] | None = weakref.ref(diagnose)

    def __call__(self) -> str:
        diagnose = None if self._held is None else self._held()
        return "" if diagnose is None else diagnose()

    def __getstate__(self) -> dict[str, object]:
        # Weak references cannot be pickled.
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
    """Describe the status of a sample in one sentence, with the remedy for a failure."""
    if status is Status.CONVERGED:
        return f"converged to a relative residual of {residual:.1e} in {iterations} iterations"
    if status is Status.STATIONARY:
        return (
            f"stationary to a relative residual of {residual:.1e} after {iterations} iterations; "
            "not tested for a minimum (set check_minimum=True to test)"
        )
    if status is Status.OUT_OF_ITERATIONS:
        if tolerance < 10 * epsilon:
            remedy = (
                "the tolerance is below the precision of the data type: raise it, or compute in a "
                "wider type (model.double())"
            )
        elif "max_iterations" not in remedy:
            remedy = f"raise max_iterations or the tolerance, or {remedy or USUAL_REMEDY}"
        return (
            f"out of iterations: relative residual {residual:.1e} after {iterations} iterations, "
            f"tolerance {tolerance:.1e}; {remedy}"
        )
    if status is Status.STALLED:
        if residual <= tolerance:
            remedy = "the point is stationary, but the stopping rule of the solver is not met there"
        elif residual <= math.sqrt(epsilon):
            remedy = "rounding hides any further decrease: raise the tolerance"
        elif not remedy:
            remedy = "it has a kink there: smooth the term that causes it (sign, norm or maximum)"
        return (
            f"stalled after {iterations} iterations: the objective has stopped falling at a "
            f"relative residual of {residual:.1e}, tolerance {tolerance:.1e}; {remedy}"
        )
    remedy = remedy or USUAL_REMEDY
    return (
        f"diverged after {iterations} iterations: the input contains NaN or Inf, or the map is "
        f"not contractive; check the input, and {remedy}"
    )
