"""What a training run tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """One epoch, measured on the training batches as they were used."""

    epoch: int
    """The first is 1."""
    loss: float
    accuracy: float
    share_converged: float | None
    """None for a model without an equilibrium, as is `mean_iterations`."""
    mean_iterations: float | None
    gradient_norm: float
    """The mean, before clipping."""
    learning_rate: float
    """That of the last step."""
    validation_accuracy: float | None = None
    """On images held out of the training; None where there were none, as is the loss."""
    validation_loss: float | None = None
    seconds: float = field(default=0.0, compare=False)
    """The only number that differs between equal runs."""


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Where a run stands after a step."""

    epoch: int
    step: int
    """Of the whole run; the first is 1."""
    steps: int
    loss: float
