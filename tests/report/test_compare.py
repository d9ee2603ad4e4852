"""Comparison of runs, in folders written by the tests."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from equilibria.models import create_model
from equilibria.models.registry import parameter_count
from equilibria.report.compare import (
    comparison_png,
    differing_settings,
    read_runs,
    store_evaluation,
)
from equilibria.report.style import COLORS
from equilibria.training import CheckpointWarning, save_weights
from equilibria.training.files import sealed_json


def make_run(
    folder: Path, lines: list[dict[str, Any]], recipe: dict[str, dict[str, Any]] | None = None
) -> Path:
    parts: dict[str, dict[str, Any]] = {
        "model": {"name": "opteq-small"},
        "data": {"name": "digits"},
        "training": {"epochs": 9},
    }
    for part, changes in (recipe or {}).items():
        parts[part] |= changes
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(parts))
    entries = [{"epoch": index + 1, **line} for index, line in enumerate(lines)]
    text = "".join(sealed_json(entry, indent=None) + "\n" for entry in entries)
    if text:
        (folder / "metrics.jsonl").write_text(text)
    return folder


def line(loss: float, **others: Any) -> dict[str, Any]:
    return {"loss": loss, "accuracy": 0.5, "mean_iterations": 4.0, "cpu_seconds": 30.0, **others}


def drawn(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def pixels_of(picture: np.ndarray, color: str) -> int:
    rgb = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
    return int((np.abs(picture.astype(int) - rgb) < 3).all(axis=2).sum())


def test_differing_settings_ignore_equal_values(tmp_path: Path) -> None:
    first = {"model": {"options": {"channels": 8}}, "training": {"clip_norm": 1}}
    second = {
        "data": {"augmentation": [{"shift": {"pixels": 1}}]},
        "training": {"clip_norm": 1.0, "gradient": "one_step"},
    }
    runs = read_runs([make_run(tmp_path / "a", [], first), make_run(tmp_path / "b", [], second)])
    assert differing_settings(runs) == {
        "model.options.channels": [8, None],
        "data.augmentation": [[], [{"shift": {"pixels": 1}}]],
        "training.gradient": [None, "one_step"],
    }


def test_sums_and_curves_of_missing_metrics_are_empty(tmp_path: Path) -> None:
    incomplete = line(2.0)
    del incomplete["cpu_seconds"]
    whole, part = read_runs(
        [
            make_run(tmp_path / "whole", [line(3.0), line(2.0, cpu_seconds=10.0)]),
            make_run(tmp_path / "part", [line(3.0), incomplete]),
        ]
    )
    assert whole.running_total("cpu_seconds") == [30.0, 40.0]
    assert part.running_total("cpu_seconds") == []
    assert part.total("cpu_seconds") is None
    assert part.curve("loss") == [(0, 3.0), (1, 2.0)]
    assert part.curve("validation_score") == []


@pytest.mark.parametrize(
    "spoiled", ["{}", '{"epoch": "2"}', '{"epoch": 2, "loss": [1]}', "[1]", "["]
)
def test_damaged_lines_of_metrics_are_skipped(tmp_path: Path, spoiled: str) -> None:
    folder = make_run(tmp_path / "run", [line(3.0)])
    if spoiled.startswith("{"):
        spoiled = sealed_json(json.loads(spoiled), indent=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(spoiled * 3000 if spoiled == "[" else spoiled)
    with pytest.warns(CheckpointWarning, match="line 2 of .* is damaged"):
        (run,) = read_runs([folder])
    assert run.as_data()["epochs"] == 1


def test_truncated_last_line_of_metrics_is_skipped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(3.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "lo')
    with pytest.warns(CheckpointWarning, match="line 2 of .* is damaged"):
        (run,) = read_runs([folder])
    assert run.as_data()["epochs"] == 1


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


def test_run_with_unregistered_data_set_is_compared(tmp_path: Path) -> None:
    foreign = make_run(tmp_path / "foreign", [line(2.0)], {"data": {"name": "unregistered"}})
    known = make_run(tmp_path / "known", [line(2.0)])
    assert [run.kind for run in read_runs([foreign, known])] == [None, "classification"]


def test_stored_evaluations_are_used_for_finished_runs_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(2.0)])
    store_evaluation(folder, {"accuracy": 0.75, "mean_iou": float("nan")})
    (unfinished,) = read_runs([folder])
    assert unfinished.as_data()["test_accuracy"] is None
    model = create_model("opteq-small")
    save_weights(model, folder / "model.safetensors")
    store_evaluation(folder, {"accuracy": 0.75, "mean_iou": float("nan")})
    (finished,) = read_runs([folder])
    facts = finished.as_data()
    assert (facts["test_accuracy"], facts["test_mean_iou"]) == (0.75, None)
    assert facts["parameters"] == parameter_count(model)
    (folder / "evaluation.json").write_text("{broken")
    with pytest.warns(CheckpointWarning, match=r"evaluation.json is damaged"):
        assert read_runs([folder])[0].evaluation is None


def test_no_folders_are_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        read_runs([])
