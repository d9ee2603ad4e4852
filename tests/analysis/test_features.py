"""Statistics of features, and relations between branches."""

from __future__ import annotations

import pytest
import torch

from equilibria.analysis.features import channel_correlation, feature_statistics, relations
from equilibria.energies.branch_coupling import diversity, heritage
from equilibria.models.mopteq.models import branch_features
from tests.analysis.classifiers import small_classifier


def test_relations_resample_branches_of_different_resolutions() -> None:
    classifier = small_classifier("mopteq-small")
    with torch.no_grad():
        solution = classifier.solve(torch.rand(3, 1, 8, 8))
        fine, coarse = branch_features(classifier.layer.cell, solution.state, solution.context)
        measured = relations([fine, coarse])
    up = torch.nn.functional.interpolate(coarse, scale_factor=2) / 4
    down = torch.nn.functional.avg_pool2d(fine, 2)
    similar = (heritage(fine, up) + heritage(coarse, down)) / (2 * 8)
    diverse = (diversity(fine, up) + diversity(coarse, down)) / (2 * 56)
    torch.testing.assert_close(measured.heritage, similar)
    torch.testing.assert_close(measured.diversity, diverse)
    assert float(measured.correlation.max()) == pytest.approx(1.0)


def test_feature_statistics_match_closed_forms() -> None:
    feature = torch.zeros(4, 2, 1, 1)
    feature[:, 0, 0, 0] = torch.tensor([3.0, -3.0, 3.0, -3.0])
    feature[:, 1, 0, 0] = torch.tensor([4.0, 4.0, -4.0, -4.0])
    statistics = feature_statistics(feature)
    assert statistics["Mean |z| (L1)"] == pytest.approx(3.5)
    assert statistics["Mean z² (L2)"] == pytest.approx(12.5)
    assert statistics["Length ‖z‖, mean (incay)"] == pytest.approx(5.0)
    assert statistics["cos² between channels, mean (decorrelation)"] == pytest.approx(
        0.0, abs=1e-12
    )
    assert statistics["Share of numbers next to zero"] == 0.0
    correlation = channel_correlation(feature)
    torch.testing.assert_close(correlation, torch.eye(2))
    doubled = feature_statistics(torch.cat([feature[:, :1], 2 * feature[:, :1]], dim=1))
    assert doubled["cos² between channels, mean (decorrelation)"] == pytest.approx(1.0)
