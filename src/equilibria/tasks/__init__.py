"""What networks are trained to do: losses and measures sample by sample, and one evaluation."""

from equilibria.tasks.base import Task, create_task, list_tasks, register_task
from equilibria.tasks.certified import CertifiedClassification
from equilibria.tasks.classification import (
    AdversarialClassification,
    BranchClassification,
    Classification,
    Segmentation,
    class_accuracy,
    class_iou,
    confusion_matrix,
)
from equilibria.tasks.evaluation import Evaluation, Outcome, SolveStatistics
from equilibria.tasks.few_shot import EpisodeBatch, FewShot
from equilibria.tasks.images import Autoencoding, ImageRestoration, Reconstruction, latents_of
from equilibria.tasks.meta_learning import IMAML, MAML, Reptile
from equilibria.tasks.photo_prior import PhotoPriorTask
from equilibria.tasks.restoring import chosen_damage, restorer_of

__all__ = [
    "IMAML",
    "MAML",
    "AdversarialClassification",
    "Autoencoding",
    "BranchClassification",
    "CertifiedClassification",
    "Classification",
    "EpisodeBatch",
    "Evaluation",
    "FewShot",
    "ImageRestoration",
    "Outcome",
    "PhotoPriorTask",
    "Reconstruction",
    "Reptile",
    "Segmentation",
    "SolveStatistics",
    "Task",
    "chosen_damage",
    "class_accuracy",
    "class_iou",
    "confusion_matrix",
    "create_task",
    "latents_of",
    "list_tasks",
    "register_task",
    "restorer_of",
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
    "few-shot": FewShot,
    "maml": MAML,
    "reptile": Reptile,
    "imaml": IMAML,
}.items():
    register_task(_name, _factory)
