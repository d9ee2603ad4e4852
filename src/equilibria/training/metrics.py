"""What a training run tells about itself, and as TensorBoard shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """One epoch, measured on the training batches as they were used.

    Examples:
        >>> data = eq.data.Split(torch.rand(8, 1, 8, 8), torch.arange(8))
        >>> settings = eq.training.TrainingSettings(epochs=1, batch_size=8)
        >>> model, task = eq.load("digits-opteq"), eq.tasks.Classification()
        >>> (epoch,) = eq.training.fit(model, task, data, settings)
        >>> epoch.epoch, epoch.loss > 0
        (1, True)
    """

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
    """Where a run stands after a step.

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
    """Of the whole run; the first is 1."""
    steps: int
    loss: Tensor
    """Of this step; a tensor, because reading it makes an accelerator wait."""


GROUPS = {
    **dict.fromkeys(("share_converged", "mean_iterations"), "solver"),
    **dict.fromkeys(("seconds", "cpu_seconds"), "cost"),
}
"""Of numbers in TensorBoard that are neither of training nor of validation."""
VALIDATION = "validation_"


class TensorBoardLog:
    """Writes the numbers of every epoch, such as `training/loss`, as event files into `folder`.

    The first epoch that a log is given takes the place of what earlier logs in the folder say of
    it and of later ones: a resumed run goes on, a new one starts over.
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
        """Write an epoch; it is on the disk when this returns."""
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
        """Close the writer, if it was opened."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
