"""Which samples to show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.data import Split
from equilibria.tasks import Evaluation


@dataclass(frozen=True)
class Exhibit:
    """One image with what the model says of it."""

    image: Tensor
    label: int
    prediction: int
    confidence: float
    iterations: int | None

    @property
    def is_right(self) -> bool:
        return self.label == self.prediction


def choose_exhibits(
    split: Split, evaluation: Evaluation, *, count: int = 12, mistakes: int = 6
) -> list[Exhibit]:
    """Mistakes first, up to `mistakes` of them, then right ones, class after class."""
    wrong = (evaluation.predictions != split.labels).nonzero().squeeze(1).tolist()[:mistakes]
    right = (evaluation.predictions == split.labels).nonzero().squeeze(1)
    chosen = wrong + _class_after_class(right, split.labels)[: count - len(wrong)]
    iterations = torch.cat(evaluation.solves.iterations) if evaluation.solves.iterations else None
    # A batch whose samples are coupled is one problem: it has no iterations of a single sample.
    per_sample = iterations is not None and len(iterations) == len(split)
    return [
        Exhibit(
            image=split.images[index],
            label=int(split.labels[index]),
            prediction=int(evaluation.predictions[index]),
            confidence=float(evaluation.confidences[index]),
            iterations=int(iterations[index]) if per_sample and iterations is not None else None,
        )
        for index in chosen
    ]


def _class_after_class(indices: Tensor, labels: Tensor) -> list[int]:
    """The first of every class, then the second of every class, and so on."""
    seen: dict[int, int] = {}
    keyed = []
    for index in indices.tolist():
        label = int(labels[index])
        seen[label] = seen.get(label, 0) + 1
        keyed.append((seen[label], label, index))
    return [index for _, _, index in sorted(keyed)]
