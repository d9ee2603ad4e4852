"""Telling the class of every pixel: the loss, the training step, and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.tasks.base import TrainingStep
from equilibria.tasks.classification import confusion_matrix, pooled_counts
from equilibria.tasks.solve_statistics import SolveStatistics


@dataclass(frozen=True)
class Segmentation:
    """Pixelwise cross-entropy; pixels labelled `ignore_index` count for nothing.

    A sample, to this task, is a labelled pixel: `TrainingStep.samples` counts them, `correct` those
    of the right class, and the loss is their mean (zero where no pixel is labelled).
    """

    ignore_index: int = 255

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        logits = model(inputs)
        targets = check_label_maps(logits, targets, self.ignore_index)
        labelled = (targets != self.ignore_index).sum()
        total = F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="sum")
        # An ignored pixel never equals a prediction: its index is that of no class.
        correct = (logits.detach().argmax(dim=1) == targets).sum()
        return TrainingStep(loss=total / labelled.clamp_min(1), samples=labelled, correct=correct)

    def evaluate(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> SegmentationEvaluation:
        return evaluate_segmentation(model, batches, ignore_index=self.ignore_index)


@dataclass(frozen=True)
class SegmentationEvaluation:
    """How a segmenter does on labelled images, and how its solves went.

    Everything follows from one matrix of counts over all pixels of all images. A class that cannot
    be judged is NaN, and left out of the means.
    """

    loss: float
    """Mean cross-entropy of a labelled pixel."""
    confusion: Tensor
    """Counts of labelled pixels, shape `(true class, predicted class)`."""
    solves: SolveStatistics

    @property
    def samples(self) -> int:
        """The labelled pixels."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> int:
        return int(self.confusion.diagonal().sum())

    @property
    def accuracy(self) -> float:
        """aAcc: the share of pixels of the right class."""
        return self.correct / self.samples

    @property
    def class_accuracy(self) -> Tensor:
        """Of each class, the share of its pixels that were found; NaN where it has none."""
        return self._hits / self.confusion.sum(dim=1)

    @property
    def class_iou(self) -> Tensor:
        """Intersection ÷ union of each class; NaN where it is neither there nor predicted."""
        union = self.confusion.sum(dim=0) + self.confusion.sum(dim=1) - self._hits
        return self._hits / union

    @property
    def mean_accuracy(self) -> float:
        """mAcc: the mean of `class_accuracy`."""
        return float(self.class_accuracy.nanmean())

    @property
    def mean_iou(self) -> float:
        """mIoU: the mean of `class_iou`."""
        return float(self.class_iou.nanmean())

    @property
    def score(self) -> float:
        """The mIoU."""
        return self.mean_iou

    @property
    def figures(self) -> dict[str, float | None]:
        return {
            "accuracy": self.accuracy,
            "mean_iou": self.mean_iou,
            "mean_accuracy": self.mean_accuracy,
        }

    def with_solves(self, solves: SolveStatistics) -> SegmentationEvaluation:
        return replace(self, solves=solves)

    def pooled(self, total: Callable[[Tensor], Tensor]) -> SegmentationEvaluation:
        """Loss and counts over all processes; the solves stay those of this one."""
        loss, confusion = pooled_counts(self.loss, self.confusion, total)
        return replace(self, loss=loss, confusion=confusion)

    @property
    def _hits(self) -> Tensor:
        return self.confusion.diagonal().double()


@torch.no_grad()
def evaluate_segmentation(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, ignore_index: int = 255
) -> SegmentationEvaluation:
    """Evaluate `model`, in evaluation mode, on batches of images and label maps.

    Images may differ in size from batch to batch; nothing but counts is kept of a batch.
    """
    was_training = model.training
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    solves = SolveStatistics()
    confusion: Tensor | None = None
    loss = 0.0
    model.eval()
    try:
        for images, labels in batches:
            logits = model(images.to(device)).float()
            targets = check_label_maps(logits, labels.to(device), ignore_index)
            solves.observe(model)
            labelled = targets != ignore_index
            counts = confusion_matrix(
                targets[labelled], logits.argmax(dim=1)[labelled], classes=logits.shape[1]
            ).cpu()
            confusion = counts if confusion is None else confusion + counts
            loss += float(
                F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
            )
    finally:
        model.train(was_training)
    if confusion is None or not confusion.any():
        raise ValueError("there is nothing to evaluate: the batches hold no labelled pixel")
    return SegmentationEvaluation(
        loss=loss / int(confusion.sum()), confusion=confusion, solves=solves
    )


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
