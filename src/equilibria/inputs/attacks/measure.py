"""The figures of an attack on many images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.inputs.attacks.attack import attack
from equilibria.inputs.attacks.result import AttackResult, joined
from equilibria.inputs.attacks.settings import AttackSettings

SEED = 0
"""Of random starts: the same attack gives the same figures."""
NINETY_FIVE = 1.959964
"""The quantile of the normal distribution for an interval of 95%."""


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


def measure(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    batch_size: int,
    on_batch: Callable[[], object] = lambda: None,
) -> tuple[AttackFigures, AttackResult]:
    """One method on all images, batch by batch."""
    chance = torch.Generator().manual_seed(SEED)
    started = time.process_time()
    results = []
    for first in range(0, len(images), batch_size):
        some = slice(first, first + batch_size)
        results.append(
            attack(model, images[some], labels[some], generator=chance, **settings.as_options())
        )
        on_batch()
    result = joined(results)
    withstood, count = int((~result.success).sum()), len(result.labels)
    low, high = wilson_interval(withstood, count)
    figures = AttackFigures(
        method=settings.method,
        norm=settings.norm,
        eps=settings.eps,
        steps=settings.chosen_steps,
        restarts=settings.restarts,
        samples=count,
        accuracy=result.accuracy,
        robust_accuracy=result.robust_accuracy,
        low=low,
        high=high,
        clean_loss=float(result.initial_loss.double().mean()),
        loss=float(result.loss.double().mean()),
        mean_distance=float(result.distance.mean()),
        evaluations=result.evaluations,
        vjps=result.vjps,
        cpu_seconds=time.process_time() - started,
    )
    return figures, result


def wilson_interval(hits: int, count: int, quantile: float = NINETY_FIVE) -> tuple[float, float]:
    """Where the share of hits lies that `count` samples estimate (Wilson, 1927)."""
    share, squared = hits / count, quantile**2
    center = (share + squared / (2 * count)) / (1 + squared / count)
    spread = math.sqrt(share * (1 - share) / count + squared / (4 * count**2))
    half = quantile * spread / (1 + squared / count)
    # The ends are exact; rounding would leave them beside the share itself.
    low = 0.0 if hits == 0 else center - half
    return low, 1.0 if hits == count else center + half
