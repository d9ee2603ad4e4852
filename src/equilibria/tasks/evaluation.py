"""Per-sample outcomes of tasks, and the result of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""From a vector of this process to the concatenated vectors of all processes."""


class Solved(Protocol):
    """Per-problem result of a solve or a search over inputs, such as a `Solution`."""

    @property
    def iterations(self) -> Tensor: ...

    @property
    def residual(self) -> Tensor: ...

    @property
    def converged(self) -> Tensor: ...


@dataclass(frozen=True)
class Outcome:
    """Losses and measures of the samples of one or several batches.

    Args:
        values: Values by name, one per sample. "loss" is required and, in training,
            differentiable. "correct" is for tasks with right and wrong predictions. "weight" is for
            samples with several counted items, such as labelled pixels or queries of an episode;
            "loss" and "correct" are then sums over these. "unanswered" marks samples without a
            valid prediction. Other names are specific to the task.
        counts: Tensors by name that are summed over batches, such as a confusion matrix.
        solves: Result of the searches of the task; None reports the solves of the model's layers.

    Examples:
        >>> values = {"loss": torch.tensor([1.0, 3.0]), "correct": torch.ones(2)}
        >>> outcome = eq.tasks.Outcome(values)
        >>> float(outcome.loss), outcome.accuracy
        (2.0, 1.0)
    """

    values: Mapping[str, Tensor]
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    solves: Solved | None = None

    @property
    def samples(self) -> Tensor:
        """Number of counted items, on the device of the loss (without a synchronization)."""
        if "weight" in self.values:
            return self.values["weight"].sum()
        first = self.values.get("correct", self.values["loss"]).detach()
        return torch.full_like(first.sum(), len(first))

    @property
    def loss(self) -> Tensor:
        """Mean loss of the counted items."""
        losses = self.values["loss"]
        if "weight" not in self.values:
            return losses.mean()
        return losses.sum() / self.samples.clamp_min(1)

    @property
    def correct(self) -> Tensor | None:
        """Number of correct predictions; None if the task does not count them."""
        return self.values["correct"].sum() if "correct" in self.values else None

    @property
    def accuracy(self) -> float | None:
        """Fraction of correct predictions; None if the task does not count them."""
        correct = self.correct
        return None if correct is None else float(correct) / float(self.samples)

    def mean(self, name: str) -> float | None:
        """Return the mean of a value over the samples, or None if it is not recorded.

        Args:
            name: Name of the value.
        """
        return float(self.values[name].double().mean()) if name in self.values else None

    def median(self, name: str) -> float | None:
        """Return the median of a value over the samples, or None if it is not recorded.

        Args:
            name: Name of the value.
        """
        return float(self.values[name].double().median()) if name in self.values else None

    def detached(self) -> Outcome:
        """Return a copy on the CPU, without a graph, in double precision."""
        values = {name: value.detach().cpu() for name, value in self.values.items()}
        return Outcome(
            {n: v.double() if v.is_floating_point() else v for n, v in values.items()},
            {name: count.detach().cpu() for name, count in self.counts.items()},
        )


@dataclass(frozen=True)
class SolveStatistics:
    """Statistics of solves, one entry per problem: a sample, or a batch that is solved as a whole.

    For models without an equilibrium there are no entries, and all summary values are None.

    Attributes:
        iterations: Number of iterations of each problem.
        residuals: Relative residual ‖T(y) − y‖/‖T(y)‖ of each problem, y its state and T the map.
        converged: Whether each problem converged.

    Examples:
        >>> statistics = eq.evaluate("digits-opteq").solves
        >>> len(statistics.iterations), statistics.share_converged
        (450, 1.0)
    """

    iterations: Tensor
    residuals: Tensor
    converged: Tensor

    @classmethod
    def of(
        cls, solutions: Sequence[Solved], gather: Gather = lambda local: local
    ) -> SolveStatistics:
        """Return the statistics of solutions, including those of other processes."""

        def concatenated(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
            local = torch.cat([part.detach().cpu() for part in parts]) if parts else torch.zeros(0)
            return gather(local.to(dtype))

        return cls(
            concatenated([solution.iterations for solution in solutions], torch.int64),
            concatenated([solution.residual for solution in solutions], torch.float64),
            concatenated([solution.converged for solution in solutions], torch.bool),
        )

    @property
    def share_converged(self) -> float | None:
        """Fraction of problems that converged; None without problems."""
        return float(self.converged.double().mean()) if len(self.converged) else None

    @property
    def mean_iterations(self) -> float | None:
        """Mean number of iterations; None without problems."""
        return float(self.iterations.double().mean()) if len(self.iterations) else None

    @property
    def max_iterations(self) -> int | None:
        """Largest number of iterations; None without problems."""
        return int(self.iterations.max()) if len(self.iterations) else None

    @property
    def max_residual(self) -> float | None:
        """Largest residual; None without problems."""
        return float(self.residuals.max()) if len(self.residuals) else None


@dataclass(frozen=True)
class Evaluation:
    """Result of the evaluation of a model.

    Attributes:
        loss: Mean loss.
        accuracy: Fraction of correct predictions; None if the task does not count them.
        score: Measure by which models are ranked; larger is better.
        samples: Number of counted samples.
        correct: Number of correct predictions; None if the task does not count them.
        figures: All measures by name, except the loss and those of the solver.
        values: Per-sample values by name, concatenated over processes.
        counts: Summed tensors by name, such as a confusion matrix.
        solves: Statistics of the solves.

    Examples:
        >>> evaluation = eq.evaluate("digits-opteq")
        >>> evaluation.samples, evaluation.correct / evaluation.samples == evaluation.accuracy
        (450, True)
    """

    loss: float
    accuracy: float | None
    score: float
    samples: int
    correct: int | None
    figures: Mapping[str, float | None]
    values: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    solves: SolveStatistics


def last_solves(outcome: Outcome, recorded: Sequence[Solved]) -> list[Solved]:
    """Return the solves that the result of a batch comes from: the task's, or the last recorded."""
    return list(recorded[-1:]) if outcome.solves is None else [outcome.solves]


def join_outcomes(parts: Sequence[Outcome], gather: Gather) -> Outcome | None:
    """Join the outcomes of all batches of all processes; None without batches."""
    if not parts:
        return None
    first = parts[0]
    values = {name: torch.cat([p.values[name] for p in parts]) for name in first.values}
    counts = {name: torch.stack([p.counts[name] for p in parts]).sum(0) for name in first.counts}
    return Outcome(
        {name: gather(value) for name, value in values.items()},
        {n: gather(c.flatten()).view(-1, *c.shape).sum(0) for n, c in counts.items()},
    )
