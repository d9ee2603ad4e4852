"""Whether a classifier is as sure as it is right.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Of test images, gathered by how sure the model is."""

    points: tuple[tuple[float, float], ...]
    """(mean confidence, accuracy) of every bin that holds something."""
    counts: tuple[int, ...]
    error: float
    """The expected calibration error: |accuracy − confidence|, weighted by the counts."""


def calibration(confidence: Tensor, correct: Tensor) -> Calibration:
    """Confidences in [0, 1], and whether each answer was right, in `BINS` bins of equal width."""
    confidence, correct = confidence.double(), correct.double()
    place = (confidence * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(place, minlength=BINS).double()
    sums = torch.stack(
        [torch.bincount(place, values, minlength=BINS) for values in (confidence, correct)]
    )
    means = sums / counts.clamp_min(1)
    error = (counts * (means[0] - means[1]).abs()).sum() / counts.sum().clamp_min(1)
    held = counts > 0
    return Calibration(
        points=tuple((float(x), float(y)) for x, y in means[:, held].T.tolist()),
        counts=tuple(int(count) for count in counts[held].tolist()),
        error=float(error),
    )
