"""Calibration of classifiers: whether confidence matches accuracy.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 10
"""Number of confidence bins of equal width."""


@dataclass(frozen=True)
class Calibration:
    """Accuracy of predictions, binned by confidence."""

    points: tuple[tuple[float, float], ...]
    """(mean confidence, accuracy) of every bin that is not empty."""
    counts: tuple[int, ...]
    """Number of predictions in each of these bins."""
    error: float
    """Expected calibration error: mean |accuracy − confidence| weighted by `counts`."""


def calibration(confidence: Tensor, correct: Tensor) -> Calibration:
    """Measure calibration in `BINS` bins of equal width.

    Args:
        confidence: Confidence of each prediction in [0, 1], shape (B,).
        correct: Whether each prediction is correct, shape (B,).
    """
    confidence, correct = confidence.double(), correct.double()
    bins = (confidence * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(bins, minlength=BINS).double()
    sums = torch.stack(
        [torch.bincount(bins, values, minlength=BINS) for values in (confidence, correct)]
    )
    means = sums / counts.clamp_min(1)
    error = (counts * (means[0] - means[1]).abs()).sum() / counts.sum().clamp_min(1)
    is_filled = counts > 0
    return Calibration(
        points=tuple((float(x), float(y)) for x, y in means[:, is_filled].T.tolist()),
        counts=tuple(int(count) for count in counts[is_filled].tolist()),
        error=float(error),
    )
