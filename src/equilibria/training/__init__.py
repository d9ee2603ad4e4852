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
from equilibria.training.tuning import tune
from equilibria.training.tuning_report import (
    Measurement,
    Setting,
    TuningReport,
    explain_none,
    recommend,
)

__all__ = [
    "EpochMetrics",
    "Measurement",
    "NonFiniteError",
    "RunFolder",
    "Setting",
    "StepProgress",
    "TrainingSettings",
    "TuningReport",
    "atomic_writer",
    "build_optimizer",
    "choose_device",
    "explain_none",
    "load_weights",
    "parameter_groups",
    "recommend",
    "save_weights",
    "train",
    "tune",
    "warmup_cosine",
    "write_atomically",
]
