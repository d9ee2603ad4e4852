"""Measures of a run."""

from __future__ import annotations

import pytest

from equilibria.analysis import measure_run
from equilibria.report import report_page
from tests.report.pages import Checker, experiment, history


@pytest.mark.slow
def test_full_report_measures_robustness_and_refined_radii() -> None:
    small = experiment(width=8, test_samples=10)
    full = measure_run(small, history(), name="a run", quick=False, refine=True)
    assert full.robustness is not None
    assert set(full.robustness.over_eps) == {"pgd", "jiio", "fgsm"}
    assert full.certified is not None
    assert "pattern" in full.certified.certificate.radii
    assert full.left_out == []
    page = Checker(report_page([full]))
    assert "Accuracy over the distance" in page.text
    assert "Not measured" not in page.text
    given = measure_run(small, history(), robustness=full.robustness)
    assert given.robustness == full.robustness
