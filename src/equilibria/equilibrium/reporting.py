"""How a layer reports its solves: warnings, once each, and errors."""

from __future__ import annotations

import dataclasses

from equilibria.context.caller import warn_caller
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.diagnosis import Diagnosis
from equilibria.equilibrium.solving import Solving
from equilibria.solvers import ConvergenceError, ConvergenceWarning, Solution, Status
from equilibria.solvers.method import Method


class BatchCouplingWarning(UserWarning):
    """At inference the answer for a sample depends on what else is in its batch."""


class SolveReports:
    """The warnings of one layer. Each kind is given once, also where twins of the layer solve."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        """Kinds of warnings that were given; the backward log of the layer adds its own."""

    def is_new(self, kind: str) -> bool:
        """Whether this kind of warning is given for the first time; it then counts as given."""
        new = kind not in self.given
        self.given.add(kind)
        return new

    def warn_of_coupling(self) -> None:
        """Warn that the result of a sample depends on the rest of the batch."""
        if self.is_new("coupling"):
            warn_caller(
                "this layer couples the samples of a batch (a regularizer such as decorrelation "
                "or HSIC): the result of each depends on the others in its batch. Run samples one "
                "by one, or always in the same batches, where that matters.",
                BatchCouplingWarning,
            )

    def warn_of_precision(self, asked: float, solution: Solution) -> None:
        """Warn of a tolerance that the numbers cannot resolve, and name the one that was used."""
        if solution.tolerance > asked and self.is_new("precision"):
            warn_caller(
                f"the tolerance {asked:.1e} is below the precision of the numbers, "
                f"{solution.epsilon:.1e}: solves end at {solution.tolerance:.1e}. Raise the "
                "tolerance, or compute in a wider type (model.double())",
                ConvergenceWarning,
            )

    def failure_message(
        self, solution: Solution, solving: Solving, solver: Method, *, training: bool
    ) -> str | None:
        """Return what to say about a solve; None if it converged or is not to be reported.

        A strict layer reports every failure, others the first one of each status.

        Args:
            solution: Result of the solve, with its diagnosis attached.
            solving: Settings that the layer solves with.
            solver: Solver of this call.
            training: Whether the layer is in training mode.
        """
        if solution.worst_status is Status.CONVERGED:
            return None
        if not solving.strict:
            ordinary = training and is_ordinary_in_training(solution, solving, solver)
            if ordinary or not self.is_new(f"forward {solution.worst_status.name}"):
                return None
        return solution.summary()


def is_ordinary_in_training(solution: Solution, solving: Solving, solver: Method) -> bool:
    """Whether a failed solve is an ordinary event of training.

    So it is where all samples are near the tolerance. It is also where the iterations ran out and
    the gradient rule defines the output as the last iterate, or a custom stopping criterion
    replaces the tolerance.
    """
    by_design = solving.gradient.from_zero or solver.stop is not None
    if solution.worst_status is Status.OUT_OF_ITERATIONS and by_design:
        return True
    return not bool(solution.is_unusable.any())


def with_diagnosis(solution: Solution, cell: Cell) -> Solution:
    """Attach the diagnosis of a failed solve, which is computed when a message is read."""
    # The message of a stalled solve carries its own remedy.
    if solution.worst_status in (Status.CONVERGED, Status.STALLED):
        return solution
    diagnosis = Diagnosis(cell, solution.state, solution.context)
    return dataclasses.replace(solution, diagnose=diagnosis)


def raise_or_warn(message: str, *, strict: bool) -> None:
    """Raise `ConvergenceError` with this message, or warn."""
    if strict:
        raise ConvergenceError(message)
    warn_caller(message, ConvergenceWarning)
