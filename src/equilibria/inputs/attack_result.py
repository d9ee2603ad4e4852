"""What an attack found, image by image and in figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.attack_settings import AttackSettings

NINETY_FIVE = 1.959964
"""The quantile of the normal distribution for an interval of 95%."""


@dataclass(frozen=True)
class AttackResult:
    """Adversarial images with what the model says of them, sample by sample.

    Logits and losses before and after come from the same ordinary forward pass in evaluation mode,
    equilibria solved anew: what the model would say of the image, not what the search believed.
    """

    images: Tensor
    """The adversarial images: within eps and the range to the last bit."""
    labels: Tensor
    initial_logits: Tensor
    logits: Tensor
    initial_loss: Tensor
    loss: Tensor
    distance: Tensor
    """‖δ‖ in the attack's norm."""
    evaluations: int
    """Calls of the map in the search, for the whole batch; of the model if it has no map."""
    vjps: int
    """Pull-backs through it."""
    settings: AttackSettings
    status: Tensor | None = None
    """How JIIO ended (`Status`); of its last run where there are restarts. None for others."""

    @property
    def initial_predictions(self) -> Tensor:
        return self.initial_logits.argmax(dim=1)

    @property
    def predictions(self) -> Tensor:
        return self.logits.argmax(dim=1)

    @property
    def success(self) -> Tensor:
        """Whether the prediction for the adversarial image is wrong (it may have been before)."""
        return self.predictions != self.labels

    @property
    def accuracy(self) -> float:
        """Before the attack."""
        return float((self.initial_predictions == self.labels).double().mean())

    @property
    def robust_accuracy(self) -> float:
        """Under the attack."""
        return float((~self.success).double().mean())

    def summary(self) -> str:
        """One line on all samples."""
        asked = self.settings
        return (
            f"{asked.method} ({asked.norm}, eps {asked.eps:g}): accuracy {self.accuracy:.1%} → "
            f"{self.robust_accuracy:.1%}, mean loss {float(self.initial_loss.mean()):.4g} → "
            f"{float(self.loss.mean()):.4g}, in {self.evaluations} evaluations of the map and "
            f"{self.vjps} pull-backs"
        )


def joined(results: list[AttackResult]) -> AttackResult:
    """The results of several batches as one; evaluations are added up."""
    if not results:
        raise ValueError("there is nothing to join: no batch was attacked")

    def together(name: str, first: Any) -> Any:
        values = [getattr(result, name) for result in results]
        if isinstance(first, Tensor):
            return torch.cat(values)
        return sum(values) if isinstance(first, int) else first

    first = results[0]
    return AttackResult(**{f.name: together(f.name, getattr(first, f.name)) for f in fields(first)})


@dataclass(frozen=True)
class AttackFigures:
    """One method's row of the table."""

    method: str
    norm: str
    eps: float
    steps: int
    restarts: int
    samples: int
    accuracy: float
    robust_accuracy: float
    low: float
    """The lower end of the Wilson interval of the robust accuracy, at 95%."""
    high: float
    clean_loss: float
    loss: float
    """Mean cross-entropy under the attack, equilibria solved anew."""
    mean_distance: float
    evaluations: int
    vjps: int
    cpu_seconds: float


def wilson_interval(hits: int, count: int, quantile: float = NINETY_FIVE) -> tuple[float, float]:
    """Where the share of hits lies that `count` samples estimate (Wilson, 1927)."""
    share, squared = hits / count, quantile**2
    center = (share + squared / (2 * count)) / (1 + squared / count)
    spread = math.sqrt(share * (1 - share) / count + squared / (4 * count**2))
    half = quantile * spread / (1 + squared / count)
    # The ends are exact; rounding would leave them beside the share itself.
    low = 0.0 if hits == 0 else center - half
    return low, 1.0 if hits == count else center + half
