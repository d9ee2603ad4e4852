"""Calibration of classifiers."""

from __future__ import annotations

import pytest
import torch

from equilibria.analysis.calibration import calibration


def test_calibration_bins_predictions_by_confidence() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.55, 0.55, 1.0])
    correct = torch.tensor([True, True, True, False, True, False, True])
    result = calibration(confidence, correct)
    assert result.counts == (2, 5)
    assert result.points == (pytest.approx((0.55, 0.5)), pytest.approx((0.96, 0.8)))
    assert result.error == pytest.approx((2 * 0.05 + 5 * 0.16) / 7)
    sure = calibration(torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert sure.error == 0.0
