"""What a training loop asks of a task."""

from __future__ import annotations

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


class Task(Protocol):
    """What is learned: it says what one training step is."""

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep: ...
