"""Telling the class of every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.tasks.base import Task
from equilibria.tasks.classification import confusion_matrix
from equilibria.tasks.evaluation import Outcome


@dataclass(frozen=True)
class Segmentation(Task):
    """Pixelwise cross-entropy; pixels labelled `ignore_index` count for nothing.

    What is counted are labelled pixels: the loss is their mean (zero where no pixel is labelled).
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
        labelled = targets != self.ignore_index
        confusion = confusion_matrix(
            targets.long()[labelled], logits.argmax(dim=1)[labelled], classes=logits.shape[1]
        )
        return Outcome(step.values, {"confusion": confusion})

    def figures(self, found: Outcome) -> dict[str, float | None]:
        """aAcc, the share of pixels of the right class, and the means over classes mIoU and mAcc.

        A class that cannot be judged is NaN, and left out of the means.
        """
        confusion = found.counts["confusion"]
        return {
            "accuracy": found.accuracy,
            "mean_iou": float(class_iou(confusion).nanmean()),
            "mean_accuracy": float(class_accuracy(confusion).nanmean()),
        }

    def _step(self, logits: Tensor, targets: Tensor) -> Outcome:
        targets = check_label_maps(logits, targets, self.ignore_index)
        losses = F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="none")
        # An ignored pixel never equals a prediction: its index is that of no class.
        right = logits.detach().argmax(dim=1) == targets
        labelled = targets != self.ignore_index
        pixels = {"loss": losses, "correct": right, "weight": labelled}
        return Outcome({name: value.flatten(1).sum(dim=1) for name, value in pixels.items()})


def class_accuracy(confusion: Tensor) -> Tensor:
    """Of each class, the share of its pixels that were found; NaN where it has none."""
    return confusion.diagonal().double() / confusion.sum(dim=1)


def class_iou(confusion: Tensor) -> Tensor:
    """Intersection ÷ union of each class; NaN where it is neither there nor predicted."""
    hits = confusion.diagonal().double()
    return hits / (confusion.sum(dim=0) + confusion.sum(dim=1) - hits)


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
