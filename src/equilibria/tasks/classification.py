"""Classification of images, also under attack, and of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.equilibrium import solving
from equilibria.inputs import AttackSettings, attack
from equilibria.inputs.attack_settings import AttackMethod, Norm
from equilibria.inputs.attacks import adversarial_images
from equilibria.models import heritage_diversity_loss
from equilibria.models.base import predicted_classes
from equilibria.models.mopteq.models import branch_features
from equilibria.registry import check_share, check_values
from equilibria.tasks.base import Task
from equilibria.tasks.evaluation import Outcome

TrainingMethod = Literal["clean", "fgsm", "pgd", "jiio"]


def confusion_matrix(labels: Tensor, predictions: Tensor, *, classes: int) -> Tensor:
    """Count the samples of each true class (row) that were predicted as each class (column).

    Negative predictions mark samples without a valid prediction and are not counted.

    Examples:
        >>> labels, predictions = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
        >>> from equilibria.tasks.classification import confusion_matrix
        >>> confusion_matrix(labels, predictions, classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    answered = predictions >= 0
    pairs = (labels * classes + predictions)[answered]
    counts = torch.bincount(pairs, minlength=classes**2)
    return counts.reshape(classes, classes)


@dataclass(frozen=True)
class Classification(Task):
    """Classification by cross-entropy.

    Args:
        label_smoothing: Weight of the uniform distribution in the targets of training.

    Examples:
        >>> task = eq.tasks.Classification(label_smoothing=0.1)
        >>> task.label_smoothing
        0.1
    """

    names_classes: ClassVar[bool] = True

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_values(self, below_one=("label_smoothing",))

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        return _step(model(inputs), targets, self.label_smoothing)

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Return losses, predictions, their softmax probabilities, and the confusion matrix."""
        logits = model(inputs).float()
        step = _step(logits, targets)
        predictions = predicted_classes(logits)
        values = {
            "prediction": predictions,
            "confidence": logits.softmax(dim=1).amax(dim=1),
            "unanswered": predictions < 0,
        }
        if logits.shape[1] > 5:
            matches = logits.topk(5, dim=1).indices == targets[:, None]
            values["top5"] = matches.any(dim=1) & (predictions >= 0)
        confusion = confusion_matrix(targets, predictions, classes=logits.shape[1])
        return Outcome({**step.values, **values}, {"confusion": confusion})

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        """Return the accuracy and the top-5 accuracy, which is None with at most five classes."""
        return {"accuracy": outcome.accuracy, "top5_accuracy": outcome.mean("top5")}


@dataclass(frozen=True)
class BranchClassification(Classification):
    """Classification with a penalty on the features of a POptEqs or MOptEqs model's branches.

    The penalty γ(λD − H) is added to the cross-entropy; H is the heritage of neighboring branches
    and D their diversity. This is the augmented loss of Li et al. (MOptEqs), Section 3.2, which
    they compare with heritage and diversity in the hidden objective. It has no lower bound: a large
    γ makes the features of the branches diverge.

    Args:
        label_smoothing: Weight of the uniform distribution in the targets of training.
        gamma: Weight γ of the additional term.
        diversity: Weight λ of the diversity D.

    Examples:
        >>> model = eq.create_model("mopteq-small", in_channels=1)
        >>> task = eq.tasks.BranchClassification(gamma=0.01)
        >>> task.training_step(model, torch.rand(2, 1, 8, 8), torch.tensor([0, 1])).samples
        tensor(2)
    """

    gamma: float = 0.0
    diversity: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, not_negative=("gamma", "diversity"))

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        with solving(model, record="equilibria") as record:
            step = super().training_step(model, inputs, targets)
        if not record.equilibria:
            raise TypeError(
                f"the task 'branches' needs a POptEqs or MOptEqs model, got {type(model).__name__}"
            )
        last = record.equilibria[-1]
        branches = branch_features(last.layer.cell, last.state, last.context)
        related = heritage_diversity_loss(branches, self.diversity)
        return Outcome({**step.values, "loss": step.values["loss"] + self.gamma * related})


def _step(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Outcome:
    try:
        losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    except IndexError as error:
        raise ValueError(
            f"labels must be below num_classes={logits.shape[1]}, got {int(targets.max())}; raise "
            "the model's num_classes or map the labels"
        ) from error
    return Outcome({"loss": losses, "correct": predicted_classes(logits) == targets})


@dataclass(frozen=True)
class AdversarialClassification(Task):
    """Adversarial training of a classifier: minimize the loss of the worst images within `eps`.

    The objective is Σᵢ max_{‖δᵢ‖ ≤ eps} ℓ(h(xᵢ + δᵢ), yᵢ) (JIIO Eq. 25) with the classifier h,
    images xᵢ, labels yᵢ, perturbations δᵢ and the loss ℓ. A training step attacks the images of the
    batch (`attack`) and minimizes the cross-entropy of the adversarial images, with the gradient of
    Eq. 19 by the layer's gradient rule.

    Args:
        eps: Largest norm of a perturbation; pixels are in [0, 1].
        norm: Norm of the perturbation, "l2" or "linf".
        method: Method that finds the training images; "clean" trains on the original images.
        steps: Number of steps of that method, as in `AttackSettings`.
        step_size: Step size of that method, as in `AttackSettings`.
        random_start: Start at random points, as in `AttackSettings`.
        warm_start: Start solves at the previous equilibrium, as in `AttackSettings`.
        joint_options: Options of JIIO, as in `AttackSettings`.
        clip: Lowest and highest value of a pixel; None for no limits.
        label_smoothing: Weight of the uniform distribution in the targets of training.
        attack_method: Method of the attack in evaluations.
        attack_steps: Number of steps of the attack in evaluations.
        attack_restarts: Number of restarts of the attack in evaluations.
        attack_share: Fraction of each batch that is attacked in evaluations.

    Examples:
        >>> task = eq.tasks.AdversarialClassification(eps=0.3, norm="l2", steps=2)
        >>> model, data = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> evaluation = task.evaluate(model, [(data.images[:4], data.labels[:4])])
        >>> evaluation.figures["robust_accuracy"] <= evaluation.accuracy
        True
    """

    score: ClassVar[str] = "robust_accuracy"
    names_classes: ClassVar[bool] = True

    eps: float
    norm: Norm = "l2"
    method: TrainingMethod = "pgd"
    steps: int | None = None
    step_size: float | None = None
    random_start: bool = False
    warm_start: bool = False
    joint_options: Mapping[str, Any] = field(default_factory=dict)
    clip: tuple[float, float] | None = (0.0, 1.0)
    label_smoothing: float = 0.0
    attack_method: AttackMethod = "pgd"
    attack_steps: int | None = None
    attack_restarts: int = 1
    attack_share: float = 1.0

    def __post_init__(self) -> None:
        check_values(
            self, below_one=("label_smoothing",), one_of={"method": get_args(TrainingMethod)}
        )
        check_share(attack_share=self.attack_share)
        self._search_settings()
        self._attack_settings()

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        settings = self._search_settings()
        if settings is not None:
            inputs = adversarial_images(model, inputs, targets, settings)
        return _step(model(inputs), targets, self.label_smoothing)

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Return the loss under attack, and the accuracy and solves without an attack."""
        count = math.ceil(self.attack_share * len(inputs))
        settings = self._attack_settings()
        attacked = attack(model, inputs[:count], targets[:count], settings, generator=generator)
        predictions = predicted_classes(model(inputs))
        return Outcome(
            {
                "loss": attacked.loss,
                "correct": predictions == targets,
                "robust": ~attacked.success,
                "unanswered": predictions < 0,
            }
        )

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        return {"accuracy": outcome.accuracy, "robust_accuracy": outcome.mean("robust")}

    def _search_settings(self) -> AttackSettings | None:
        """Return the settings of attacks in training; None without attacks."""
        if self.method == "clean":
            return None
        names = ("method", "steps", "step_size", "random_start", "warm_start", "joint_options")
        return AttackSettings(**self._budget, **{name: getattr(self, name) for name in names})

    def _attack_settings(self) -> AttackSettings:
        """Return the settings of attacks in evaluations."""
        names = ("method", "steps", "restarts")
        options = {name: getattr(self, f"attack_{name}") for name in names}
        return AttackSettings(**self._budget, **options)

    @property
    def _budget(self) -> dict[str, Any]:
        return {"eps": self.eps, "norm": self.norm, "clip": self.clip}


@dataclass(frozen=True)
class Segmentation(Task):
    """Classification of pixels by cross-entropy.

    The loss is the mean over all labelled pixels; it is zero if there are none.

    Args:
        ignore_index: Label of pixels that are ignored.

    Examples:
        >>> logits, labels = torch.zeros(1, 3, 2, 2), torch.tensor([[[0, 0], [1, 255]]])
        >>> task = eq.tasks.Segmentation(ignore_index=255)
        >>> task.training_step(torch.nn.Identity(), logits, labels).samples  # labelled pixels
        tensor(3)
    """

    score: ClassVar[str] = "mean_iou"
    unit: ClassVar[str] = "labelled pixel"
    names_classes: ClassVar[bool] = True

    ignore_index: int = 255

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        return self._step(model(inputs), targets)

    def evaluation_step(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> Outcome:
        """Return losses and counts only, because the size of images may differ between batches."""
        logits = model(inputs).float()
        step = self._step(logits, targets)
        labelled, classes = targets != self.ignore_index, logits.shape[1]
        truths, predictions = targets.long()[labelled], predicted_classes(logits)[labelled]
        counts = {
            "confusion": confusion_matrix(truths, predictions, classes=classes),
            "unanswered": torch.bincount(truths[predictions < 0], minlength=classes),
        }
        return Outcome(step.values, counts)

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        """Return the pixel accuracy (aAcc) and the means over classes mIoU and mAcc.

        Classes without pixels are not part of the means.
        """
        confusion, unanswered = outcome.counts["confusion"], outcome.counts["unanswered"]
        return {
            "accuracy": outcome.accuracy,
            "mean_iou": float(class_iou(confusion, unanswered).nanmean()),
            "mean_accuracy": float(class_accuracy(confusion, unanswered).nanmean()),
        }

    def _step(self, logits: Tensor, targets: Tensor) -> Outcome:
        targets = check_label_maps(logits, targets, self.ignore_index)
        losses = F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="none")
        labelled = targets != self.ignore_index
        right = (predicted_classes(logits) == targets) & labelled
        pixels = {"loss": losses, "correct": right, "weight": labelled}
        return Outcome({name: value.flatten(1).sum(dim=1) for name, value in pixels.items()})


def class_accuracy(confusion: Tensor, unanswered: Tensor | int = 0) -> Tensor:
    """Return the fraction of correct pixels of each class; NaN for a class without pixels.

    Args:
        confusion: Confusion matrix of `confusion_matrix`.
        unanswered: Number of pixels of each class without a valid prediction.

    Examples:
        >>> from equilibria.tasks.classification import class_accuracy
        >>> class_accuracy(torch.tensor([[3, 1], [0, 4]]))
        tensor([0.7500, 1.0000], dtype=torch.float64)
    """
    return confusion.diagonal().double() / (confusion.sum(dim=1) + unanswered)


def class_iou(confusion: Tensor, unanswered: Tensor | int = 0) -> Tensor:
    """Return intersection ÷ union of each class; NaN if it neither occurs nor is predicted.

    Args:
        confusion: Confusion matrix of `confusion_matrix`.
        unanswered: Number of pixels of each class without a valid prediction.

    Examples:
        >>> from equilibria.tasks.classification import class_iou
        >>> class_iou(torch.tensor([[3, 1], [0, 4]]))
        tensor([0.7500, 0.8000], dtype=torch.float64)
    """
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(dim=0) + confusion.sum(dim=1) + unanswered - hits)


def check_label_maps(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return the label maps as integers; raise `ValueError` if they do not fit the logits."""
    if logits.dim() != 4 or labels.shape != (len(logits), *logits.shape[2:]):
        raise ValueError(
            "segmentation needs logits of shape (B, classes, H, W) and label maps of shape "
            f"(B, H, W), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    classes = logits.shape[1]
    if 0 <= ignore_index < classes:
        raise ValueError(
            f"ignore_index must not be one of the {classes} classes, got {ignore_index}"
        )
    targets = labels.long()
    invalid = (targets != ignore_index) & ((targets < 0) | (targets >= classes))
    if invalid.any():
        raise ValueError(
            f"labels must be below {classes}, the number of classes, or equal to "
            f"ignore_index={ignore_index}, got {int(targets[invalid][0])}; give the model more "
            "classes or map the labels"
        )
    return targets
