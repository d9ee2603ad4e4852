"""What a task finds sample by sample, and what an evaluation makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""From a vector of this process to those of all processes, one after another."""


class Solved(Protocol):
    """How problems were solved, one by one: a `Solution`, or a search over inputs."""

    @property
    def iterations(self) -> Tensor: ...

    @property
    def residual(self) -> Tensor: ...

    @property
    def converged(self) -> Tensor: ...


@dataclass(frozen=True)
class Outcome:
    """What a task finds on one batch, or on many batches together.

    values: by name, one number a sample. "loss", in training in the graph; "correct", where there
        is right and wrong; "weight", where a sample holds several things that are counted (the
        labelled pixels of an image, the queries of an episode): "loss" and "correct" are then their
        sums. "unanswered": where a model has no answer (or as a count). All other names are the
        task's own.
    counts: by name, tensors that add up over batches, such as a confusion matrix.
    solves: of the searches that the task made itself; None: what the model's layers solved counts.

    Examples:
        >>> found = eq.tasks.Outcome({"loss": torch.tensor([1.0, 3.0]), "correct": torch.ones(2)})
        >>> float(found.loss), found.accuracy
        (2.0, 1.0)
    """

    values: Mapping[str, Tensor]
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    solves: Solved | None = None

    @property
    def samples(self) -> Tensor:
        """How many things were counted, on the device of the loss, so that nobody waits for it."""
        if "weight" in self.values:
            return self.values["weight"].sum()
        first = self.values.get("correct", self.values["loss"]).detach()
        return torch.full_like(first.sum(), len(first))

    @property
    def loss(self) -> Tensor:
        """The mean of the losses."""
        losses = self.values["loss"]
        if "weight" not in self.values:
            return losses.mean()
        return losses.sum() / self.samples.clamp_min(1)

    @property
    def correct(self) -> Tensor | None:
        """How many were right; None where there is no right and wrong."""
        return self.values["correct"].sum() if "correct" in self.values else None

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions, if the task counts them."""
        correct = self.correct
        return None if correct is None else float(correct) / float(self.samples)

    def mean(self, name: str) -> float | None:
        """The mean of a value over the samples; None where the task did not give it."""
        return float(self.values[name].double().mean()) if name in self.values else None

    def median(self, name: str) -> float | None:
        """Return the median of a per-sample value, if recorded."""
        return float(self.values[name].double().median()) if name in self.values else None

    def detached(self) -> Outcome:
        """On the CPU, without a graph, in double precision."""
        values = {name: value.detach().cpu() for name, value in self.values.items()}
        return Outcome(
            {n: v.double() if v.is_floating_point() else v for n, v in values.items()},
            {name: count.detach().cpu() for name, count in self.counts.items()},
        )


@dataclass(frozen=True)
class SolveStatistics:
    """How many problems were solved, problem by problem.

    Models without an equilibrium leave no solutions: the numbers are then None, not made up.

    Examples:
        >>> statistics = eq.evaluate("digits-opteq").solves
        >>> len(statistics.iterations), statistics.share_converged
        (450, 1.0)
    """

    iterations: Tensor
    residuals: Tensor
    """The relative residuals ‖T(y) − y‖/‖T(y)‖."""
    converged: Tensor

    @classmethod
    def of(cls, found: Sequence[Solved], gather: Gather = lambda own: own) -> SolveStatistics:
        """Of all these, and of those of other processes."""

        def concatenated(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
            own = torch.cat([part.detach().cpu() for part in parts]) if parts else torch.zeros(0)
            return gather(own.to(dtype))

        return cls(
            concatenated([solution.iterations for solution in found], torch.int64),
            concatenated([solution.residual for solution in found], torch.float64),
            concatenated([solution.converged for solution in found], torch.bool),
        )

    @property
    def share_converged(self) -> float | None:
        """Share of samples that converged; None without samples."""
        return float(self.converged.double().mean()) if len(self.converged) else None

    @property
    def mean_iterations(self) -> float | None:
        """Mean number of iterations; None without samples."""
        return float(self.iterations.double().mean()) if len(self.iterations) else None

    @property
    def max_iterations(self) -> int | None:
        """Largest number of iterations; None without samples."""
        return int(self.iterations.max()) if len(self.iterations) else None

    @property
    def max_residual(self) -> float | None:
        """Largest residual; None without samples."""
        return float(self.residuals.max()) if len(self.residuals) else None


@dataclass(frozen=True)
class Evaluation:
    """How a model does on samples that it was not trained on, and how its solves went.

    Examples:
        >>> found = eq.evaluate("digits-opteq")
        >>> found.samples, found.correct / found.samples == found.accuracy
        (450, True)
    """

    loss: float
    accuracy: float | None
    """None where there is no right and wrong, as is `correct`."""
    score: float
    """What the best of several models has most of."""
    samples: int
    correct: int | None
    figures: Mapping[str, float | None]
    """All measures by name, besides the loss and those of the solver."""
    values: Mapping[str, Tensor]
    """Sample by sample; those of several processes one after another."""
    counts: Mapping[str, Tensor]
    solves: SolveStatistics


def last_solves(outcome: Outcome, recorded: Sequence[Solved]) -> list[Solved]:
    """What says how the problems of a batch were solved: the pass that its result comes from."""
    return list(recorded[-1:]) if outcome.solves is None else [outcome.solves]


def join_outcomes(parts: Sequence[Outcome], gather: Gather) -> Outcome | None:
    """All batches of all processes as one."""
    if not parts:
        return None
    first = parts[0]
    values = {name: torch.cat([p.values[name] for p in parts]) for name in first.values}
    counts = {name: torch.stack([p.counts[name] for p in parts]).sum(0) for name in first.counts}
    return Outcome(
        {name: gather(value) for name, value in values.items()},
        {n: gather(c.flatten()).view(-1, *c.shape).sum(0) for n, c in counts.items()},
    )
