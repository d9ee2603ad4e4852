"""Metrics of a training run, and their log for TensorBoard."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """Metrics of one epoch; training metrics are means over the batches during the epoch.

    Attributes:
        epoch: Number of the epoch; the first is 1.
        loss: Training loss per sample.
        accuracy: Training accuracy; None if the task has no accuracy.
        share_converged: Share of samples whose solve converged; None without an equilibrium.
        mean_iterations: Mean number of iterations per solve; None without an equilibrium.
        gradient_norm: Mean norm of the gradient before clipping.
        learning_rate: Learning rate of the last step.
        validation_accuracy: Accuracy on the validation samples, if there are any.
        validation_loss: Loss on the validation samples, if there are any.
        validation_score: Score that determines the best epoch, such as the accuracy, or the mIoU
            for segmentation.
        seconds: Wall-clock time. Only the two times differ between identical runs.
        cpu_seconds: CPU time of all threads.

    Examples:
        >>> data = eq.data.Split(torch.rand(8, 1, 8, 8), torch.arange(8))
        >>> settings = eq.training.TrainingSettings(epochs=1, batch_size=8)
        >>> model, task = eq.load("digits-opteq"), eq.tasks.Classification()
        >>> (epoch,) = eq.training.fit(model, task, data, settings)
        >>> epoch.epoch, epoch.loss > 0
        (1, True)
    """

    epoch: int
    loss: float
    accuracy: float | None
    share_converged: float | None
    mean_iterations: float | None
    gradient_norm: float
    learning_rate: float
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    validation_score: float | None = None
    seconds: float = field(default=0.0, compare=False)
    cpu_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Progress of a run after a step.

    Attributes:
        epoch: Number of the epoch; the first is 1.
        step: Number of the step in the whole run; the first is 1.
        steps: Number of steps of the whole run.
        loss: Loss of the step, a tensor because reading it synchronizes with the device.

    Examples:
        >>> steps, data = [], eq.data.Split(torch.rand(8, 1, 8, 8), torch.arange(8))
        >>> settings = eq.training.TrainingSettings(epochs=1, batch_size=4)
        >>> model, task = eq.load("digits-opteq"), eq.tasks.Classification()
        >>> _ = eq.training.fit(model, task, data, settings, on_step=steps.append)
        >>> [(progress.step, progress.steps) for progress in steps]
        [(1, 2), (2, 2)]
    """

    epoch: int
    step: int
    steps: int
    loss: Tensor


GROUPS = {
    **dict.fromkeys(("share_converged", "mean_iterations"), "solver"),
    **dict.fromkeys(("seconds", "cpu_seconds"), "cost"),
}
"""Groups in TensorBoard of metrics that belong neither to training nor to validation."""
VALIDATION = "validation_"


class TensorBoardLog:
    """Log of the metrics of every epoch, such as `training/loss`, as TensorBoard event files.

    The first epoch that is written replaces this and later epochs in existing logs. A resumed run
    thus continues the log, and a new run starts over.

    Args:
        folder: Folder of the event files.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "TensorBoard is not installed: pip install equilibria[tensorboard]",
                name="tensorboard",
            ) from None
        self.folder = folder
        self._writer_class = SummaryWriter
        self._writer: Any = None

    def on_epoch(self, metrics: EpochMetrics) -> None:
        """Write the metrics of an epoch to the disk."""
        if self._writer is None:
            self._writer = self._writer_class(str(self.folder), purge_step=metrics.epoch)
        for name, value in asdict(metrics).items():
            if name == "epoch" or value is None:
                continue
            group = "validation" if name.startswith(VALIDATION) else GROUPS.get(name, "training")
            tag = f"{group}/{name.removeprefix(VALIDATION)}"
            self._writer.add_scalar(tag, float(value), metrics.epoch)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
