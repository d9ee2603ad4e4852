"""The commands train, evaluate, predict, recipes, and runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import equilibria
from equilibria.data import load_digits
from equilibria.training import RunFolder
from equilibria.training.recipe import find_recipe
from tests.program import invoke

TIMES = ("seconds", "cpu_seconds")
SHORT = ["training.epochs=3", "data.options.train_samples=200", "model.options.channels=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    result = invoke("train", "digits-opteq", "training.epochs=6", "--output", folder)
    assert result.exit_code == 0, result.output
    assert "epoch 6/6" in result.output
    return folder


def test_run_folder_has_weights_metrics_and_checkpoints(finished: Path) -> None:
    run = RunFolder(finished)
    assert run.config.is_file()
    assert run.weights.is_file()
    assert [line["epoch"] for line in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["epoch-00005", "epoch-00006"]


def test_evaluate_prints_figures_as_table_and_json(finished: Path) -> None:
    result = invoke("evaluate", finished, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert 0.8 < figures["accuracy"] <= 1
    assert figures["samples"] == 450
    assert figures["share_converged"] == 1
    assert figures["mean_iterations"] > 0
    assert "Accuracy" in invoke("evaluate", finished).output


def test_predict_classifies_image_files(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_digits()
    for i in range(8):
        pixels = (data.test.images[i, 0] * 255).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).resize((32, 32), Image.Resampling.NEAREST).save(
            tmp_path / f"{i}.png"
        )
    result = invoke("predict", finished, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    predictions = json.loads(result.output)
    assert [Path(p["file"]).name for p in predictions] == [f"{i}.png" for i in range(8)]
    right = sum(p["label"] == str(int(data.test.labels[i])) for i, p in enumerate(predictions))
    assert right >= 6
    assert all(p["converged"] for p in predictions)
    monkeypatch.chdir(tmp_path)
    assert "0.png" in invoke("predict", finished, "0.png").output
    (tmp_path / "text.png").write_text("no image")
    wrong = invoke("predict", finished, tmp_path / "text.png")
    assert wrong.exit_code == 1
    assert "cannot be read as an image" in " ".join(wrong.output.split())
    assert "no file or folder" in invoke("predict", finished, tmp_path / "nothing").output


def test_recipe_is_printed_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = invoke("recipes", "digits-opteq").output
    assert shown == find_recipe("digits-opteq").read_text(encoding="utf-8")
    for arguments, file in (([], "digits-opteq.yaml"), (["mine.yaml"], "mine.yaml")):
        assert invoke("recipes", "digits-opteq", "--copy", *arguments).exit_code == 0
        assert (tmp_path / file).read_text(encoding="utf-8") == shown
    (tmp_path / "mine.yaml").write_text("mine")
    refused = invoke("recipes", "digits-opteq", "--copy", "mine.yaml")
    assert refused.exit_code == 2
    assert "mine.yaml exists" in " ".join(refused.output.split())
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    assert "did you mean 'digits-opteq'" in invoke("recipes", "digits-optq").output
    assert "add --copy" in invoke("recipes", "digits-opteq", "other.yaml").output


def test_recipes_of_the_working_directory_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    invoke("recipes", "digits-opteq", "--copy", "recipes/mine.yaml")
    assert find_recipe("mine") == tmp_path / "recipes" / "mine.yaml"
    assert "mine" in invoke("recipes").output


def test_recipes_and_runs_are_listed(finished: Path) -> None:
    assert "digits-opteq" in invoke("recipes").output
    listed = invoke("runs", finished.parent).output
    assert "6/6" in listed
    assert "finished" in listed


def test_wrong_names_are_errors_with_suggestions(tmp_path: Path) -> None:
    for arguments, message in (
        (["digits-optq"], "did you mean 'digits-opteq'"),
        (["digits-opteq", "training.epoch=1"], "did you mean 'epochs'"),
        (["digits-opteq", "model.name=opteq-smal"], "did you mean 'opteq-small'"),
        (["digits-opteq", "data.name=digts"], "did you mean 'digits'"),
        (["digits-opteq", "model.options.chanels=3"], "did you mean 'channels'"),
        (["digits-opteq", "data.augmentation=[shft]"], "did you mean 'shift'"),
    ):
        result = invoke("train", *arguments, "--output", tmp_path / "run")
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
    assert "there is no run" in invoke("evaluate", tmp_path / "nowhere").output


def test_resuming_with_another_recipe_is_an_error(finished: Path) -> None:
    result = invoke("train", "digits-opteq", "training.epochs=9", "--output", finished, "--resume")
    assert result.exit_code == 2
    assert "differs from the given recipe" in result.output


def start(folder: Path) -> subprocess.Popen[str]:
    source = str(Path(equilibria.__file__).parents[1])
    command = [sys.executable, "-m", "equilibria", "train", "digits-opteq", "--no-report"]
    command += SHORT
    return subprocess.Popen(
        [*command, "training.epochs=16", "--output", str(folder), "--resume", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX")
def test_kill_and_resume_gives_the_same_metrics(tmp_path: Path) -> None:
    """A run that is killed twice ends with the metrics and weights of an uninterrupted one."""
    complete = start(tmp_path / "complete")
    output, _ = complete.communicate(timeout=300)
    assert complete.returncode == 0, output
    folder = tmp_path / "killed"
    for _ in range(2):
        process = start(folder)
        before = len(RunFolder(folder).read_metrics())
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if len(RunFolder(folder).read_metrics()) > before + 2:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = start(folder)
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output

    def metrics(run: Path) -> list[dict[str, object]]:
        return [
            {key: value for key, value in line.items() if key not in TIMES}
            for line in RunFolder(run).read_metrics()
        ]

    assert len(metrics(folder)) == 16
    assert metrics(folder) == metrics(tmp_path / "complete")
    weights = [(run / "model.safetensors").read_bytes() for run in (folder, tmp_path / "complete")]
    assert weights[0] == weights[1]


def test_best_weights_are_evaluated_and_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = invoke("train", "digits-opteq", *SHORT, "data.validation=0.2", "--output", folder)
    assert result.exit_code == 0, result.output
    assert json.loads(invoke("evaluate", folder, "--best", "--json").output)["samples"] == 450
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    assert invoke("predict", folder, tmp_path / "black.png", "--best").exit_code == 0


def test_best_weights_without_validation_are_an_error(finished: Path) -> None:
    result = invoke("evaluate", finished, "--best")
    assert result.exit_code == 2
    assert "no validation images" in " ".join(result.output.split())
