"""Pictures that compare runs, in folders written by the tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equilibria.analysis.compare import read_runs
from equilibria.report.compare import comparison_png
from equilibria.report.style import COLORS
from tests.analysis.run_folders import line, make_run


def drawn(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def pixels_of(picture: np.ndarray, color: str) -> int:
    rgb = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
    return int((np.abs(picture.astype(int) - rgb) < 3).all(axis=2).sum())


def test_runs_have_their_colors_in_all_panels(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / str(i), [line(3.0 + i), line(1.0 + i)]) for i in range(3)]
    picture = drawn(comparison_png(read_runs(folders)))
    for color in COLORS[:3]:
        assert pixels_of(picture, color) > 100
    assert pixels_of(picture, COLORS[3]) == 0
    # The left third, without the legend, has loss over epochs above loss over time.
    left = picture[: int(0.9 * len(picture)), : picture.shape[1] // 3]
    for half in np.array_split(left, 2):
        assert all(pixels_of(half, color) > 50 for color in COLORS[:3])


def test_only_measured_quantities_have_panels(tmp_path: Path) -> None:
    bare = [{"loss": 2.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.6}]
    small = drawn(comparison_png(read_runs([make_run(tmp_path / "bare", bare)])))
    full = [line(2.0, validation_score=0.5), line(1.0, validation_score=0.6)]
    large = drawn(comparison_png(read_runs([make_run(tmp_path / "full", full)])))
    assert large.shape[1] == 2 * small.shape[1]
    assert large.shape[0] > 1.6 * small.shape[0]


@pytest.mark.parametrize("count", [1, 20])
def test_single_epochs_and_many_runs_can_be_drawn(tmp_path: Path, count: int) -> None:
    names = [f"a-run-with-a-rather-long-name-{index}" for index in range(count)]
    folders = [make_run(tmp_path / name, [line(2.0)]) for name in names]
    assert pixels_of(drawn(comparison_png(read_runs(folders))), COLORS[0]) > 50


def test_file_is_reproducible(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "run", [line(2.0), line(0.1)])])
    assert comparison_png(runs) == comparison_png(runs)
