"""Measures of runs, in folders written by the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria.analysis.compare import (
    differing_settings,
    read_runs,
    store_evaluation,
)
from equilibria.models import create_model
from equilibria.models.registry import parameter_count
from equilibria.training import CheckpointWarning, save_weights
from equilibria.training.files import sealed_json
from tests.analysis.run_folders import line, make_run


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
