"""What networks are trained to do: loss, metrics, and what one training step is."""

from equilibria.tasks.base import Result, Task, TrainingStep
from equilibria.tasks.classification import (
    Classification,
    Evaluation,
    confusion_matrix,
    evaluate,
)
from equilibria.tasks.registry import create_task, list_tasks, register_task
from equilibria.tasks.segmentation import (
    Segmentation,
    SegmentationEvaluation,
    evaluate_segmentation,
)
from equilibria.tasks.solve_statistics import SolveStatistics

__all__ = [
    "Classification",
    "Evaluation",
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
