"""The metrics of a run as TensorBoard shows them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from equilibria.training.metrics import EpochMetrics

SOLVER = ("share_converged", "mean_iterations")
COST = ("seconds", "cpu_seconds")
VALIDATION = "validation_"


class TensorBoardLog:
    """Writes the numbers of every epoch as event files into `folder`.

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
        for tag, value in tagged_scalars(metrics).items():
            self._writer.add_scalar(tag, value, metrics.epoch)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def tagged_scalars(metrics: EpochMetrics) -> dict[str, float]:
    """The numbers of an epoch by group and name, such as `training/loss`; None is left out."""
    return {
        _tag(name): float(value)
        for name, value in asdict(metrics).items()
        if name != "epoch" and value is not None
    }


def _tag(name: str) -> str:
    if name.startswith(VALIDATION):
        return f"validation/{name.removeprefix(VALIDATION)}"
    group = "solver" if name in SOLVER else "cost" if name in COST else "training"
    return f"{group}/{name}"
