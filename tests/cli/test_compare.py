"""`equilibria compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import Result

from equilibria.training import RunFolder
from equilibria.training.files import sealed_json
from tests.program import invoke

SMALL = ("data.options.train_samples=200", "model.options.channels=8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs without evaluations; the second has validation images and another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, overrides in (
        ("first", ["training.epochs=2"]),
        ("second", ["training.epochs=3", "training.learning_rate=0.01", "data.validation=0.2"]),
    ):
        result = invoke("train", "digits-opteq", *SMALL, *overrides, "--output", folder / name)
        assert result.exit_code == 0, result.output
        (folder / name / "evaluation.json").unlink(missing_ok=True)
    return folder


def interrupted_copy(run: Path, folder: Path) -> Path:
    """Copy a run as if it was interrupted after its first epoch, without processor time."""
    folder.mkdir()
    (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    first = RunFolder(run).read_metrics()[0]
    first.pop("cpu_seconds")
    (folder / "metrics.jsonl").write_text(sealed_json(first, indent=None) + "\n")
    return folder


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_json_has_facts_and_differing_settings(runs: Path) -> None:
    result = invoke("compare", runs / "first", runs / "second", "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.output)
    metrics = RunFolder(runs / "second").read_metrics()
    assert (first["run"], second["run"]) == ("first", "second")
    assert second["model"] == "opteq-small"
    assert second["data"] == "digits"
    assert (second["epochs"], second["epochs_asked"], second["state"]) == (3, 3, "finished")
    assert second["loss"] == metrics[-1]["loss"]
    assert second["accuracy"] == metrics[-1]["accuracy"]
    scores = [line["validation_score"] for line in metrics]
    assert second["best_validation_score"] == max(scores)
    assert second["best_epoch"] == 1 + scores.index(max(scores))
    assert second["last_validation_score"] == scores[-1]
    assert second["cpu_seconds"] == pytest.approx(sum(line["cpu_seconds"] for line in metrics))
    assert second["mean_iterations"] == metrics[-1]["mean_iterations"]
    assert first["best_validation_score"] is None
    assert first["settings"] == {
        "data.validation": 0.0,
        "training.epochs": 2,
        "training.learning_rate": 0.02,
    }
    assert second["settings"]["training.learning_rate"] == 0.01


def test_number_of_parameters_is_that_of_evaluate(runs: Path) -> None:
    (run,) = json.loads(invoke("compare", runs / "first", "--json").output)
    evaluated = json.loads(invoke("evaluate", runs / "first", "--json").output)
    assert run["parameters"] == evaluated["parameters"]
    assert run["settings"] == {}


def test_table_has_one_column_per_run(runs: Path) -> None:
    result = invoke("compare", runs / "first", runs / "second")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "Run first second" in lines
    assert "Epochs 2/2 3/3" in lines
    assert "training.learning_rate 0.02 0.01" in lines
    assert not any(line.startswith("training.batch_size") for line in lines)
    assert not any(line.startswith("Test accuracy") for line in lines)


def test_evaluations_are_stored_until_weights_change(runs: Path, tmp_path: Path) -> None:
    unfinished = interrupted_copy(runs / "second", tmp_path / "unfinished")
    result = invoke("compare", runs / "first", unfinished, "--evaluate", "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.output)
    evaluated = json.loads(invoke("evaluate", runs / "first", "--json").output)
    assert first["test_accuracy"] == evaluated["accuracy"]
    assert second["test_accuracy"] is None
    (again,) = json.loads(invoke("compare", runs / "first", "--json").output)
    assert again["test_accuracy"] == first["test_accuracy"]
    # An evaluation older than the weights is ignored.
    (runs / "first" / "model.safetensors").touch()
    (later,) = json.loads(invoke("compare", runs / "first", "--json").output)
    assert later["test_accuracy"] is None


def test_output_folder_has_curves_and_a_page(runs: Path, tmp_path: Path) -> None:
    unfinished = interrupted_copy(runs / "second", tmp_path / "a|b")
    output = tmp_path / "new" / "comparison"
    result = invoke("compare", runs / "first", unfinished, "--output", output)
    assert result.exit_code == 0, result.output
    with Image.open(output / "compare.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height > 300
    page = (output / "compare.md").read_text(encoding="utf-8")
    assert "| Epochs | 2/2 | 1/3 |" in page
    assert "| State | finished | interrupted |" in page
    assert "a\\|b" in page
    assert "![Curves](compare.png)" in page


def test_interrupted_runs_are_compared(runs: Path, tmp_path: Path) -> None:
    unfinished = interrupted_copy(runs / "second", tmp_path / "unfinished")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_bytes((unfinished / "config.yaml").read_bytes())
    result = invoke("compare", unfinished, empty, runs / "second", "--json")
    assert result.exit_code == 0, result.output
    early, none, finished = json.loads(result.output)
    assert (early["state"], early["epochs"], early["epochs_asked"]) == ("interrupted", 1, 3)
    assert early["cpu_seconds"] is None
    assert early["seconds"] > 0
    line = RunFolder(runs / "second").read_metrics()[0]
    assert early["best_validation_score"] == line["validation_score"]
    assert (none["epochs"], none["loss"], none["parameters"]) == (0, None, None)
    assert finished["state"] == "finished"
    assert "1/3" in invoke("compare", unfinished, empty).output
    drawn = invoke("compare", empty, "--output", tmp_path / "nothing")
    assert drawn.exit_code == 2
    assert "nothing to draw" in words(drawn)
    assert not (tmp_path / "nothing").exists()


def test_runs_with_the_same_name_are_distinguished_by_folder(runs: Path, tmp_path: Path) -> None:
    same = interrupted_copy(runs / "first", tmp_path / "first")
    compared = json.loads(invoke("compare", runs / "first", same, "--json").output)
    assert [run["run"] for run in compared] == [f"{runs.name}/first", f"{tmp_path.name}/first"]


def test_folders_that_cannot_be_compared_are_errors(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("command: demo\n")
    pixels = tmp_path / "pixels"
    pixels.mkdir()
    recipe = yaml.safe_load((runs / "first" / "config.yaml").read_text())
    recipe["data"]["name"] = "camvid"
    (pixels / "config.yaml").write_text(yaml.safe_dump(recipe))
    for folders, message in (
        ([tmp_path], "is not a run: it has no config.yaml"),
        ([tmp_path / "nowhere"], "is not a run"),
        ([other], "is not a run of `equilibria train`"),
        ([runs / "first", runs / "first"], "is given twice"),
        ([runs / "first", pixels], "different kinds of data"),
    ):
        result = invoke("compare", *folders)
        assert result.exit_code == 2, result.output
        assert message in words(result)
