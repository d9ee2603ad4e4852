"""What a training loop asks of a task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingStep:
    """The outcome of a task on one batch, before the backward pass."""

    loss: Tensor
    """The mean over the batch, in the graph."""
    samples: int
    correct: int


class Result(Protocol):
    """How a model does on samples that it was not trained on."""

    @property
    def loss(self) -> float: ...

    @property
    def accuracy(self) -> float: ...


class Task(Protocol):
    """What is learned: it says what one training step is, and how a model is evaluated."""

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep: ...

    def evaluate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Result: ...
