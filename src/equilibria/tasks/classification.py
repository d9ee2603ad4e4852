"""Telling classes apart: the loss, the training step, and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.tasks.base import TrainingStep
from equilibria.tasks.solve_statistics import SolveStatistics


@dataclass(frozen=True)
class Classification:
    """Cross-entropy over classes, the targets softened by `label_smoothing`."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), not {self.label_smoothing}")

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TrainingStep:
        logits = model(inputs)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        correct = (logits.detach().argmax(dim=1) == targets).sum()
        return TrainingStep(
            loss=loss, samples=torch.full_like(correct, len(targets)), correct=correct
        )

    def evaluate(self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Evaluation:
        return evaluate(model, batches)


@dataclass(frozen=True)
class Evaluation:
    """How a classifier does on labelled samples, and how its solves went."""

    loss: float
    """Mean cross-entropy, without label smoothing."""
    confusion: Tensor
    """Counts, shape `(true class, predicted class)`."""
    predictions: Tensor
    confidences: Tensor
    """The softmax probability of each predicted class."""
    solves: SolveStatistics
    top5_accuracy: float | None = None
    """The share of samples whose class is among the five likeliest; None with five or fewer."""

    @property
    def samples(self) -> int:
        return int(self.confusion.sum())

    @property
    def correct(self) -> int:
        return int(self.confusion.diagonal().sum())

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def score(self) -> float:
        """The accuracy."""
        return self.accuracy

    @property
    def figures(self) -> dict[str, float | None]:
        return {"accuracy": self.accuracy, "top5_accuracy": self.top5_accuracy}

    def with_solves(self, solves: SolveStatistics) -> Evaluation:
        return replace(self, solves=solves)

    def pooled(self, total: Callable[[Tensor], Tensor]) -> Evaluation:
        """Loss and counts over all processes; all else stays that of this one."""
        loss, confusion = pooled_counts(self.loss, self.confusion, total)
        top5 = self.top5_accuracy
        if top5 is not None:
            found = total(torch.tensor(top5 * self.samples, dtype=torch.float64))
            top5 = float(found) / int(confusion.sum())
        return replace(self, loss=loss, confusion=confusion, top5_accuracy=top5)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Evaluation:
    """Evaluate `model`, in evaluation mode, on batches of images and labels."""
    was_training = model.training
    device = _device_of(model)
    solves = SolveStatistics()
    all_logits, all_labels = [], []
    model.eval()
    try:
        for images, labels in batches:
            all_logits.append(model(images.to(device)).float().cpu())
            all_labels.append(labels.cpu())
            solves.observe(model)
    finally:
        model.train(was_training)
    if not all_labels:
        raise ValueError("there is nothing to evaluate: the batches hold no sample")
    logits, labels = torch.cat(all_logits), torch.cat(all_labels)
    confidences, predictions = logits.softmax(dim=1).max(dim=1)
    return Evaluation(
        loss=float(F.cross_entropy(logits, labels)),
        confusion=confusion_matrix(labels, predictions, classes=logits.shape[1]),
        predictions=predictions,
        confidences=confidences,
        solves=solves,
        top5_accuracy=_top5_accuracy(logits, labels),
    )


def _top5_accuracy(logits: Tensor, labels: Tensor) -> float | None:
    if logits.shape[1] <= 5:
        return None
    found = logits.topk(5, dim=1).indices == labels[:, None]
    return float(found.any(dim=1).double().mean())


def pooled_counts(
    loss: float, confusion: Tensor, total: Callable[[Tensor], Tensor]
) -> tuple[float, Tensor]:
    """A mean loss and its counts, over all processes."""
    summed = total(torch.tensor(loss * int(confusion.sum()), dtype=torch.float64))
    counts = total(confusion)
    return float(summed) / int(counts.sum()), counts


def confusion_matrix(labels: Tensor, predictions: Tensor, *, classes: int) -> Tensor:
    """How many samples of each true class (row) were predicted as each class (column)."""
    counts = torch.bincount(labels * classes + predictions, minlength=classes**2)
    return counts.reshape(classes, classes)


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
