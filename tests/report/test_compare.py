"""Runs read and drawn side by side, from folders made by hand."""

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
    entries = [{"epoch": at + 1, **line} for at, line in enumerate(lines)]
    text = "".join(sealed_json(entry, indent=None) + "\n" for entry in entries)
    if text:
        (folder / "metrics.jsonl").write_text(text)
    return folder


def line(loss: float, **others: Any) -> dict[str, Any]:
    return {"loss": loss, "accuracy": 0.5, "mean_iterations": 4.0, "cpu_seconds": 30.0, **others}


def drawn(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def pixels_of(picture: np.ndarray, color: str) -> int:
    rgb = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return int((np.abs(picture.astype(int) - rgb) < 3).all(axis=2).sum())


def test_settings_differ_only_where_the_recipes_do(tmp_path: Path) -> None:
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


def test_sums_and_curves_need_the_numbers_they_are_made_of(tmp_path: Path) -> None:
    without = line(2.0)
    del without["cpu_seconds"]
    whole, part = read_runs(
        [
            make_run(tmp_path / "whole", [line(3.0), line(2.0, cpu_seconds=10.0)]),
            make_run(tmp_path / "part", [line(3.0), without]),
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
def test_a_line_that_holds_no_numbers_is_left_out(tmp_path: Path, spoiled: str) -> None:
    folder = make_run(tmp_path / "run", [line(3.0)])
    if spoiled.startswith("{"):
        spoiled = sealed_json(json.loads(spoiled), indent=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(spoiled * 3000 if spoiled == "[" else spoiled)
    with pytest.warns(CheckpointWarning, match="line 2 of .* is damaged"):
        (run,) = read_runs([folder])
    assert run.as_data()["epochs"] == 1


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(3.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "lo')
    with pytest.warns(CheckpointWarning, match="line 2 of .* is damaged"):
        (run,) = read_runs([folder])
    assert run.as_data()["epochs"] == 1


def test_every_run_has_its_color_in_every_panel(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / str(at), [line(3.0 + at), line(1.0 + at)]) for at in range(3)]
    picture = drawn(comparison_png(read_runs(folders)))
    for color in COLORS[:3]:
        assert pixels_of(picture, color) > 100
    assert pixels_of(picture, COLORS[3]) == 0
    # Loss over the epochs, and over time below it: the left third, without the legend.
    left = picture[: int(0.9 * len(picture)), : picture.shape[1] // 3]
    for half in np.array_split(left, 2):
        assert all(pixels_of(half, color) > 50 for color in COLORS[:3])


def test_panels_are_there_for_what_was_measured(tmp_path: Path) -> None:
    bare = [{"loss": 2.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.6}]
    small = drawn(comparison_png(read_runs([make_run(tmp_path / "bare", bare)])))
    full = [line(2.0, validation_score=0.5), line(1.0, validation_score=0.6)]
    large = drawn(comparison_png(read_runs([make_run(tmp_path / "full", full)])))
    assert large.shape[1] == 2 * small.shape[1]
    assert large.shape[0] > 1.6 * small.shape[0]


@pytest.mark.parametrize("count", [1, 20])
def test_one_epoch_and_many_runs_can_be_drawn(tmp_path: Path, count: int) -> None:
    names = [f"a-run-with-a-rather-long-name-{at}" for at in range(count)]
    folders = [make_run(tmp_path / name, [line(2.0)]) for name in names]
    assert pixels_of(drawn(comparison_png(read_runs(folders))), COLORS[0]) > 50


def test_the_file_is_the_same_on_every_run(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "run", [line(2.0), line(0.1)])])
    assert comparison_png(runs) == comparison_png(runs)


def test_a_data_set_that_is_not_registered_here_is_no_obstacle(tmp_path: Path) -> None:
    foreign = make_run(tmp_path / "foreign", [line(2.0)], {"data": {"name": "of-my-own"}})
    known = make_run(tmp_path / "known", [line(2.0)])
    assert [run.kind for run in read_runs([foreign, known])] == [None, "classification"]


def test_a_stored_evaluation_counts_for_finished_runs(tmp_path: Path) -> None:
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


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        read_runs([])
