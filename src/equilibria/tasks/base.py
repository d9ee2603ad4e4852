"""What a training loop asks of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from equilibria.tasks.solve_statistics import SolveStatistics


@dataclass(frozen=True)
class TrainingStep:
    """The outcome of a task on one batch, before the backward pass."""

    loss: Tensor
    """The mean over the samples, in the graph."""
    samples: Tensor
    """How many there were: a number on the device of the loss, so that nobody waits for it."""
    correct: Tensor | None = None
    """How many were right; None for a task that knows no right and wrong."""


class Result(Protocol):
    """How a model does on samples that it was not trained on."""

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float | None: ...

    @property
    def score(self) -> float:
        """What the best of several models has most of."""
        ...

    @property
    def samples(self) -> int: ...

    @property
    def solves(self) -> SolveStatistics: ...

    @property
    def figures(self) -> dict[str, float | None]:
        """All measures by name, besides the loss and those of the solver."""
        ...

    def with_solves(self, solves: SolveStatistics) -> Result:
        """The same result, with the solves of all processes."""
        ...

    def pooled(self, total: Callable[[Tensor], Tensor]) -> Result:
        """The result on the samples of all processes; `total` is the sum of a tensor over them."""
        ...


class Task(Protocol):
    """What is learned: it says what one training step is, and how a model is evaluated."""

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep: ...

    def evaluate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Result: ...
