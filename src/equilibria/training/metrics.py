"""What a training run tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """One epoch, measured on the training batches as they were used."""

    epoch: int
    """The first is 1."""
    loss: float
    accuracy: float | None
    """None for a task that knows no right and wrong."""
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
    validation_score: float | None = None
    """What the best epoch has most of: the accuracy, the mIoU in segmentation, and so on."""
    seconds: float = field(default=0.0, compare=False)
    """Of the clock; this and the next are the only numbers that differ between equal runs."""
    cpu_seconds: float = field(default=0.0, compare=False)
    """Of the processor, all threads together: what the epoch cost, whatever else was running."""


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Where a run stands after a step."""

    epoch: int
    step: int
    """Of the whole run; the first is 1."""
    steps: int
    loss: Tensor
    """Of this step; a tensor, because reading it makes an accelerator wait."""
