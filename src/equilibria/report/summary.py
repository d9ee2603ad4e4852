"""The few numbers that say how a classifier did."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.report.convergence import ObjectiveChange
from equilibria.tasks import Evaluation

UNKNOWN = "not known"


@dataclass(frozen=True)
class Summary:
    """A trained classifier on its test set."""

    evaluation: Evaluation
    parameters: int
    contraction: float | None
    objective: ObjectiveChange | None
    training_seconds: float

    def rows(self) -> list[tuple[str, str]]:
        """The table: what, and how much."""
        evaluation, solves = self.evaluation, self.evaluation.solves
        rows = [
            (
                "Test accuracy",
                f"{evaluation.accuracy:.2%} ({evaluation.correct} of {evaluation.samples})",
            ),
            ("Parameters", f"{self.parameters:,}"),
            ("Iterations, mean", _number(solves.mean_iterations, ".1f")),
            ("Share converged", _number(solves.share_converged, ".1%")),
            ("Relative residual, max", _number(solves.max_residual, ".1e")),
            ("Contraction bound q", _number(self.contraction, ".3f")),
        ]
        if self.objective is not None:
            rows += [
                ("Hidden objective, first step", f"{self.objective.first:,.2f}"),
                ("Hidden objective, equilibrium", f"{self.objective.equilibrium:,.2f}"),
            ]
        return [*rows, ("Training time", f"{self.training_seconds:.1f} s")]


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
