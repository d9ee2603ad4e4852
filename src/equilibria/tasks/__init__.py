"""Training tasks: per-sample losses and measures, and the evaluation of models."""

from equilibria.tasks.base import Task, create_task, list_tasks, register_task
from equilibria.tasks.certified import CertifiedClassification
from equilibria.tasks.classification import (
    AdversarialClassification,
    BranchClassification,
    Classification,
    Segmentation,
)
from equilibria.tasks.evaluation import Evaluation, Outcome
from equilibria.tasks.few_shot import FewShot
from equilibria.tasks.images import Autoencoding, ImageRestoration, Reconstruction
from equilibria.tasks.meta_learning import IMAML, MAML, Reptile
from equilibria.tasks.photo_prior import PhotoPriorTask
from equilibria.tasks.puzzle import Puzzle

__all__ = [
    "IMAML",
    "MAML",
    "AdversarialClassification",
    "Autoencoding",
    "BranchClassification",
    "CertifiedClassification",
    "Classification",
    "Evaluation",
    "FewShot",
    "ImageRestoration",
    "Outcome",
    "PhotoPriorTask",
    "Reconstruction",
    "Reptile",
    "Segmentation",
    "Task",
    "create_task",
    "list_tasks",
    "register_task",
]

for _name, _factory in {
    "classification": Classification,
    "segmentation": Segmentation,
    "adversarial": AdversarialClassification,
    "branches": BranchClassification,
    "certified": CertifiedClassification,
    "generator": Reconstruction,
    "autoencoder": Autoencoding,
    "restoration": ImageRestoration,
    "photo-prior": PhotoPriorTask,
    "puzzle": Puzzle,
    "few-shot": FewShot,
    "maml": MAML,
    "reptile": Reptile,
    "imaml": IMAML,
}.items():
    register_task(_name, _factory)
