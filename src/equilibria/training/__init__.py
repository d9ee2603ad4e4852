"""Training: the loop, its settings and metrics, checkpoints and run folders."""

from equilibria.training.checkpoint import (
    atomic_writer,
    load_weights,
    save_weights,
    write_atomically,
)
from equilibria.training.device import choose_device
from equilibria.training.loop import NonFiniteError, train
from equilibria.training.metrics import EpochMetrics, StepProgress
from equilibria.training.optimizer import build_optimizer, parameter_groups, warmup_cosine
from equilibria.training.run import RunFolder
from equilibria.training.settings import TrainingSettings

__all__ = [
    "EpochMetrics",
    "NonFiniteError",
    "RunFolder",
    "StepProgress",
    "TrainingSettings",
    "atomic_writer",
    "build_optimizer",
    "choose_device",
    "load_weights",
    "parameter_groups",
    "save_weights",
    "train",
    "warmup_cosine",
    "write_atomically",
]
