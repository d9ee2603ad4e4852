"""`equilibria attack`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.program import invoke

SHORT = ["training.epochs=2", "model.options.channels=8", "model.options.width=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    result = invoke("train", "digits-opteq", *SHORT, "--output", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_all_methods_are_compared(finished: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "attack.png"
    options = ("--eps", 0.5, "--steps", 5, "--samples", 60)
    result = invoke("attack", finished, *options, "--method", "all", "--json", "--draw", drawn)
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads(result.output)}
    assert set(rows) == {"pgd", "jiio", "fgsm"}
    for row in rows.values():
        assert (row["samples"], row["eps"], row["norm"]) == (60, 0.5, "l2")
        assert row["low"] <= row["robust_accuracy"] <= row["high"]
        assert row["robust_accuracy"] < row["accuracy"]
        assert row["loss"] > row["clean_loss"]
        assert 0 < row["mean_distance"] <= 0.5
        assert min(row["evaluations"], row["vjps"], row["cpu_seconds"]) > 0
    assert (rows["pgd"]["steps"], rows["fgsm"]["steps"]) == (5, 1)
    assert rows["pgd"]["loss"] > rows["fgsm"]["loss"]
    with Image.open(drawn) as picture:
        assert picture.size[0] > picture.size[1] > 300


def test_attack_prints_a_table(finished: Path) -> None:
    result = invoke("attack", finished, "--norm", "linf", "--eps", 0.05, "--samples", 20)
    assert result.exit_code == 0, result.output
    for expected in ("opteq-small on 20 test images, linf, eps 0.05", "pgd-20", "Robust", "95%"):
        assert expected in result.output


def test_run_with_normalization_is_attacked_in_pixels(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distance is in pixels, and the model gets normalized images."""
    monkeypatch.setenv("EQUILIBRIA_DATA", str(real_data))
    recipe = tmp_path / "normalized.yaml"
    recipe.write_text(
        "model:\n"
        "  name: opteq-small\n"
        "  options: {channels: 8, width: 8, stem_depth: 2, stem_strides: 2, pool: 4}\n"
        "data: {name: mnist, options: {train_samples: 500, test_samples: 200}, normalize: true}\n"
        "training: {epochs: 3, batch_size: 32, learning_rate: 0.02, gradient: one_step}\n"
    )
    run = tmp_path / "run"
    assert invoke("train", recipe, "--output", run).exit_code == 0
    evaluated = json.loads(invoke("evaluate", run, "--json").output)
    options = ("--eps", 0.5, "--samples", 200, "--steps", 3, "--method", "all", "--json")
    result = invoke("attack", run, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert len(rows) == 3
    for row in rows:
        assert row["accuracy"] == pytest.approx(evaluated["accuracy"])
        assert 0.2 < row["mean_distance"] <= 0.5
        assert row["robust_accuracy"] < row["accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--eps", 1, "--method", "pdg"), "--method must be pgd, jiio, fgsm or all"),
        (("--eps", 1, "--norm", "l1"), "norm must be one of l2, linf"),
        (("--eps", 1, "--loss", "hinge"), "loss must be one of"),
        (("--eps", 1, "--method", "fgsm", "--steps", 3), "fgsm is one step"),
        (("--eps", "-1"), "eps must not be"),
    ],
)
def test_wrong_options_are_errors(
    finished: Path, arguments: tuple[object, ...], message: str
) -> None:
    result = invoke("attack", finished, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    result = invoke("attack", tmp_path, "--eps", 1)
    assert result.exit_code == 2
    assert "finished run" in result.output


def test_method_that_does_not_support_the_model_is_skipped(tmp_path: Path) -> None:
    recipe = tmp_path / "resnet.yaml"
    recipe.write_text(
        "model: {name: resnet-small, options: {channels: [4, 4], blocks: [1, 1]}}\n"
        "data: {name: digits, options: {train_samples: 200}}\n"
        "training: {epochs: 1}\n"
    )
    assert invoke("train", recipe, "--output", tmp_path / "run").exit_code == 0
    options = ("--eps", 0.3, "--samples", 10, "--steps", 2)
    alone = invoke("attack", tmp_path / "run", *options, "--method", "jiio")
    assert alone.exit_code == 2
    assert "needs a stem, a layer" in alone.output
    together = invoke("attack", tmp_path / "run", *options, "--method", "all")
    assert together.exit_code == 0, together.output
    assert "jiio skipped" in together.output
    assert "pgd-2" in together.output
    # With image files, the warning comes once, and the other methods attack all files.
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    for shade, file in zip((0, 255), files, strict=True):
        Image.new("L", (8, 8), shade).save(file)
    arguments = (tmp_path / "run", *files, "--eps", 0.3)
    alone = invoke("attack", *arguments, "--method", "jiio")
    assert alone.exit_code == 2
    assert "needs a stem, a layer" in alone.output
    written = tmp_path / "attacked"
    together = invoke("attack", *arguments, "--method", "all", "--output", written, "--json")
    assert together.exit_code == 0, together.output
    rows = json.loads(together.stdout)
    assert [row["method"] for row in rows] == ["pgd", "fgsm"] * 2
    assert together.stderr.count("jiio skipped") == 1
    assert len(list(written.iterdir())) == 4
