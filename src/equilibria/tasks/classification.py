"""Telling the classes of images, also where somebody changes them, and of their pixels."""

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
    """How many samples of each true class (row) were predicted as each class (column).

    Predictions below 0 are none, and counted nowhere.

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
    """Cross-entropy over classes; in training the targets are softened by `label_smoothing`.

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
        """Also the predictions, their softmax probabilities, and which classes are confused."""
        logits = model(inputs).float()
        step = _step(logits, targets)
        predictions = predicted_classes(logits)
        values = {
            "prediction": predictions,
            "confidence": logits.softmax(dim=1).amax(dim=1),
            "unanswered": predictions < 0,
        }
        if logits.shape[1] > 5:
            found = logits.topk(5, dim=1).indices == targets[:, None]
            values["top5"] = found.any(dim=1) & (predictions >= 0)
        confusion = confusion_matrix(targets, predictions, classes=logits.shape[1])
        return Outcome({**step.values, **values}, {"confusion": confusion})

    def figures(self, found: Outcome) -> dict[str, float | None]:
        """The top-5 accuracy is None with five classes or fewer."""
        return {"accuracy": found.accuracy, "top5_accuracy": found.mean("top5")}


@dataclass(frozen=True)
class BranchClassification(Classification):
    """Cross-entropy + γ(λD − H) over the branches of the model: MOptEqs' augmented loss.

    (Li et al., Section 3.2, where it is set against HH&D in the hidden objective, which pulls
    equilibria there without a γ.) It has no lower bound: a large γ drives the features apart.

    gamma, diversity: γ and λ.

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
            raise TypeError("the task 'branches' needs a POptEqs or MOptEqs model")
        found = record.equilibria[-1]
        branches = branch_features(found.layer.cell, found.state, found.context)
        related = heritage_diversity_loss(branches, self.diversity)
        return Outcome({**step.values, "loss": step.values["loss"] + self.gamma * related})


def _step(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Outcome:
    try:
        losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
    except IndexError as error:
        raise ValueError(
            f"labels are whole numbers from 0 to the number of classes, less one: the model has "
            f"{logits.shape[1]} classes (num_classes), and a label is {int(targets.max())}"
        ) from error
    return Outcome({"loss": losses, "correct": predicted_classes(logits) == targets})


@dataclass(frozen=True)
class AdversarialClassification(Task):
    """minimize Σᵢ max_{‖δᵢ‖ ≤ eps} ℓ(h(xᵢ + δᵢ), yᵢ) (JIIO Eq. 25).

    A step looks for the worst images near those of the batch, the model in evaluation mode and with
    its exact gradient (`attack`), and trains on what it finds by cross-entropy. The
    gradient there is that of Eq. 19, by the layer's own rule: an envelope needs no more.

    eps, norm: the budget, in pixels of [0, 1].
    method: what finds the images to train on; "clean" takes them as they are.
    steps, step_size, random_start, warm_start, joint_options: of that search, as for `attack`.
    clip: the range of the images.
    label_smoothing: softens the targets of training.
    attack_method, attack_steps, attack_restarts: the attack under which a model is evaluated.
    attack_share: the share of each batch that is attacked in an evaluation.

    Examples:
        >>> task = eq.tasks.AdversarialClassification(eps=0.3, norm="l2", steps=2)
        >>> model, data = eq.load("digits-opteq"), eq.data.load_digits().test
        >>> found = task.evaluate(model, [(data.images[:4], data.labels[:4])])
        >>> found.figures["robust_accuracy"] <= found.accuracy
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
        """The loss is that under the attack; accuracy and solves are those without it."""
        count = math.ceil(self.attack_share * len(inputs))
        settings = self._attack_settings()
        found = attack(model, inputs[:count], targets[:count], settings, generator=generator)
        predictions = predicted_classes(model(inputs))
        return Outcome(
            {
                "loss": found.loss,
                "correct": predictions == targets,
                "robust": ~found.success,
                "unanswered": predictions < 0,
            }
        )

    def figures(self, found: Outcome) -> dict[str, float | None]:
        return {"accuracy": found.accuracy, "robust_accuracy": found.mean("robust")}

    def _search_settings(self) -> AttackSettings | None:
        """How images to train on are looked for; None where they are taken as they are."""
        if self.method == "clean":
            return None
        own = ("method", "steps", "step_size", "random_start", "warm_start", "joint_options")
        return AttackSettings(**self._budget, **{name: getattr(self, name) for name in own})

    def _attack_settings(self) -> AttackSettings:
        own = ("method", "steps", "restarts")
        chosen = {name: getattr(self, f"attack_{name}") for name in own}
        return AttackSettings(**self._budget, **chosen)

    @property
    def _budget(self) -> dict[str, Any]:
        return {"eps": self.eps, "norm": self.norm, "clip": self.clip}


@dataclass(frozen=True)
class Segmentation(Task):
    """Pixelwise cross-entropy; pixels labelled `ignore_index` count for nothing.

    What is counted are labelled pixels: the loss is their mean (zero where no pixel is labelled).

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
        """Images may differ in size from batch to batch; nothing but counts is kept of a batch."""
        logits = model(inputs).float()
        step = self._step(logits, targets)
        labelled, classes = targets != self.ignore_index, logits.shape[1]
        truths, predictions = targets.long()[labelled], predicted_classes(logits)[labelled]
        counts = {
            "confusion": confusion_matrix(truths, predictions, classes=classes),
            "unanswered": torch.bincount(truths[predictions < 0], minlength=classes),
        }
        return Outcome(step.values, counts)

    def figures(self, found: Outcome) -> dict[str, float | None]:
        """aAcc, the share of pixels of the right class, and the means over classes mIoU and mAcc.

        A class that cannot be judged is NaN, and left out of the means.
        """
        confusion, unanswered = found.counts["confusion"], found.counts["unanswered"]
        return {
            "accuracy": found.accuracy,
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
    """Of each class, the share of its pixels that were found; NaN where it has none.

    unanswered: how many pixels of each class are in no column.

    Examples:
        >>> from equilibria.tasks.classification import class_accuracy
        >>> class_accuracy(torch.tensor([[3, 1], [0, 4]]))
        tensor([0.7500, 1.0000], dtype=torch.float64)
    """
    return confusion.diagonal().double() / (confusion.sum(dim=1) + unanswered)


def class_iou(confusion: Tensor, unanswered: Tensor | int = 0) -> Tensor:
    """Intersection ÷ union of each class; NaN where it is neither there nor predicted.

    Examples:
        >>> from equilibria.tasks.classification import class_iou
        >>> class_iou(torch.tensor([[3, 1], [0, 4]]))
        tensor([0.7500, 0.8000], dtype=torch.float64)
    """
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(dim=0) + confusion.sum(dim=1) + unanswered - hits)


def check_label_maps(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """The label maps as integers, or a clear error where they do not fit the logits."""
    if logits.dim() != 4 or labels.shape != (len(logits), *logits.shape[2:]):
        raise ValueError(
            "expected logits (samples, classes, height, width) and label maps (samples, height, "
            f"width) of the same size, not {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    classes = logits.shape[1]
    if 0 <= ignore_index < classes:
        raise ValueError(f"ignore_index {ignore_index} is one of the {classes} classes")
    targets = labels.long()
    foreign = (targets != ignore_index) & ((targets < 0) | (targets >= classes))
    if foreign.any():
        raise ValueError(
            f"label {int(targets[foreign][0])} is neither one of the {classes} classes nor the "
            f"ignore_index {ignore_index}: give the model more classes, or map the labels"
        )
    return targets
