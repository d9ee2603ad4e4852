"""What networks are trained to do: loss, metrics, and what one training step is."""

from equilibria.tasks.adversarial import AdversarialClassification, AdversarialEvaluation
from equilibria.tasks.autoencoding import Autoencoding
from equilibria.tasks.base import Result, Task, TrainingStep
from equilibria.tasks.classification import (
    Classification,
    Evaluation,
    confusion_matrix,
    evaluate,
)
from equilibria.tasks.few_shot import FewShot
from equilibria.tasks.imaml import IMAML
from equilibria.tasks.maml import MAML
from equilibria.tasks.reconstruction import Reconstruction
from equilibria.tasks.registry import create_task, list_tasks, register_task
from equilibria.tasks.reptile import Reptile
from equilibria.tasks.restoration import ImageRestoration, RestorationEvaluation
from equilibria.tasks.segmentation import (
    Segmentation,
    SegmentationEvaluation,
    evaluate_segmentation,
)
from equilibria.tasks.solve_statistics import SolveStatistics

__all__ = [
    "IMAML",
    "MAML",
    "AdversarialClassification",
    "AdversarialEvaluation",
    "Autoencoding",
    "Classification",
    "Evaluation",
    "FewShot",
    "ImageRestoration",
    "Reconstruction",
    "Reptile",
    "RestorationEvaluation",
    "Result",
    "Segmentation",
    "SegmentationEvaluation",
    "SolveStatistics",
    "Task",
    "TrainingStep",
    "confusion_matrix",
    "create_task",
    "evaluate",
    "evaluate_segmentation",
    "list_tasks",
    "register_task",
]

register_task("classification", Classification)
register_task("segmentation", Segmentation)
register_task("adversarial", AdversarialClassification)
register_task("generator", Reconstruction)
register_task("autoencoder", Autoencoding)
register_task("restoration", ImageRestoration)
register_task("few-shot", FewShot)
register_task("maml", MAML)
register_task("reptile", Reptile)
register_task("imaml", IMAML)
