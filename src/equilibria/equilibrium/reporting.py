"""Warnings and errors of equilibrium layers about their solves."""

from __future__ import annotations

import dataclasses

from equilibria.context.caller import warn_caller
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.diagnosis import Diagnosis
from equilibria.equilibrium.solving import Solving
from equilibria.solvers import ConvergenceError, ConvergenceWarning, Solution, Status
from equilibria.solvers.method import Method


class BatchCouplingWarning(UserWarning):
    """At inference, the result of a sample depends on the rest of its batch."""


class SolveReports:
    """Warnings of one layer and its functional copies; each kind is issued once."""

    def __init__(self) -> None:
        self.issued: set[str] = set()
        """Kinds of warnings that have been issued; the layer's backward log adds its own."""

    def is_new(self, kind: str) -> bool:
        """Return whether this kind of warning is new, and mark it as issued."""
        new = kind not in self.issued
        self.issued.add(kind)
        return new

    def warn_of_coupling(self) -> None:
        """Warn that the result of a sample depends on the rest of the batch."""
        if self.is_new("coupling"):
            warn_caller(
                "this layer couples the samples of a batch, for example by a regularizer such as "
                "decorrelation or HSIC, so the result of a sample depends on the others in its "
                "batch. If that matters, run samples one by one or always in the same batches.",
                BatchCouplingWarning,
            )

    def warn_of_precision(self, requested: float, solution: Solution) -> None:
        """Warn that the requested tolerance is below the floating-point precision."""
        if solution.tolerance > requested and self.is_new("precision"):
            warn_caller(
                f"the tolerance {requested:.1e} is below the floating-point precision "
                f"{solution.epsilon:.1e}; solves end at {solution.tolerance:.1e}. Raise the "
                "tolerance, or compute in a wider type (model.double())",
                ConvergenceWarning,
            )

    def failure_message(
        self, solution: Solution, solving: Solving, solver: Method, *, training: bool
    ) -> str | None:
        """Return the message for a failed solve.

        A strict layer reports every failure, others only the first of each status.

        Args:
            solution: Result of the solve, with its diagnosis attached.
            solving: Settings of the layer.
            solver: Solver of this call.
            training: Whether the layer is in training mode.

        Returns:
            The message, or None if the solve converged or must not be reported.
        """
        if solution.worst_status is Status.CONVERGED:
            return None
        if not solving.strict:
            ordinary = training and is_ordinary_in_training(solution, solving, solver)
            if ordinary or not self.is_new(f"forward {solution.worst_status.name}"):
                return None
        return solution.summary()


def is_ordinary_in_training(solution: Solution, solving: Solving, solver: Method) -> bool:
    """Return whether a failed solve is normal during training and needs no warning.

    It is normal if all samples are near the tolerance. Running out of iterations is also normal if
    the gradient rule or the solver defines the output as the last iterate, or a custom stopping
    criterion replaces the tolerance.
    """
    keeps_last = getattr(solver, "iterate", "best") == "last"
    by_design = keeps_last or solving.gradient.from_zero or solver.stop is not None
    if solution.worst_status is Status.OUT_OF_ITERATIONS and by_design:
        return True
    return not bool(solution.is_unusable.any())


def with_diagnosis(solution: Solution, cell: Cell) -> Solution:
    """Attach a diagnosis to a failed solve; it is computed when a message is read."""
    # The message of a stalled solve already contains a remedy.
    if solution.worst_status in (Status.CONVERGED, Status.STALLED):
        return solution
    diagnosis = Diagnosis(cell, solution.state, solution.context)
    return dataclasses.replace(solution, diagnose=diagnosis)


def raise_or_warn(message: str, *, strict: bool) -> None:
    """Raise `ConvergenceError` with this message, or warn."""
    if strict:
        raise ConvergenceError(message)
    warn_caller(message, ConvergenceWarning)
