"""Comparison of restoration methods on photographs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria.data import dataset_card
from equilibria.papers.studies.photographs import OURS, STUDY
from equilibria.papers.studies.study import Work


def test_published_test_set_is_measured_beside_published_results(
    tmp_path: Path, real_data: Path
) -> None:
    pytest.importorskip("skimage")
    if dataset_card("bsd68").find(real_data) is None:
        pytest.skip(f"NO REAL DATA: bsd68 is not below {real_data}")
    settings = ["pictures=bsd68", "tasks=[denoise-50]", f'only=["{OURS}"]', "count=1", "draws=1"]
    outcome = STUDY.carry_out(STUDY.configure(settings), Work(tmp_path))
    record = json.loads((tmp_path / "runs" / "photographs.jsonl").read_text())
    assert record["bound"] <= 1.0  # proven distance to the minimizer, in gray levels
    assert record["psnr"] > 22
    assert "BM3D (Dabov et al., 2007), published | 25.62" in outcome.text


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave out the task demosaic"):
        STUDY.carry_out(STUDY.configure(["pictures=bsd68", "tasks=[demosaic]"]), Work(tmp_path))
    with pytest.raises(ValueError, match="count must be at least 1"):
        STUDY.configure(["count=0"])
