"""Use of runs on image files: without a data set, interrupted, and with many files."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import equilibria as eq
from equilibria.cli import predict
from equilibria.data import (
    DataSet,
    DataSetCard,
    MissingDataError,
    Split,
    load_digits,
    register_dataset,
)
from equilibria.inference import predictions
from equilibria.training import CheckpointWarning, DamagedFileError
from equilibria.training.files import read_weights
from tests.program import invoke

RECIPE = """
model: {name: opteq-small, options: {channels: 8, width: 8}}
data: {name: stored-digits}
training: {epochs: 2, batch_size: 32, learning_rate: 0.01}
threads: 1
"""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(autouse=True, scope="module")
def stored_digits() -> None:
    """Register a data set that is read from a folder."""

    def load(folder: Path) -> DataSet:
        arrays = np.load(folder / "digits.npz")
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
        return DataSet("stored-digits", Split(images[:600], labels[:600]),
                       Split(images[600:], labels[600:]), NAMES)  # fmt: skip

    card = DataSetCard("stored-digits", folders=("digits",), contents=("digits.npz",))
    register_dataset(card, load, replace=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    (root / "digits").mkdir()
    train = load_digits().train
    np.savez(root / "digits/digits.npz", images=train.images[:640], labels=train.labels[:640])
    return root


@pytest.fixture(scope="module")
def trained_run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUILIBRIA_DATA", str(root))
        result = invoke("train", folder / "recipe.yaml", "--output", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.fixture
def run(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, on a machine without data sets."""
    (tmp_path / "no-data").mkdir()
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "no-data"))
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def digits(tmp_path: Path) -> list[Path]:
    (tmp_path / "digits").mkdir()
    return [
        save(image, tmp_path / "digits" / f"digit{i}.png")
        for i, image in enumerate(load_digits().test.images[:4])
    ]


def save(image: torch.Tensor, path: Path) -> Path:
    Image.fromarray((image[0] * 255).round().byte().numpy()).save(path)
    return path


def listed(*arguments: object) -> list[dict[str, Any]]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    entries: list[dict[str, Any]] = json.loads(result.stdout)
    return entries


def test_only_some_commands_need_the_data_set(run: Path, digits: list[Path], root: Path) -> None:
    predicted = listed("predict", run, *digits)
    assert {p["label"] for p in predicted} <= set(eq.load(run).images.class_names)
    assert listed("attack", run, digits[0], "--eps", 0.5)[0]["before"] == predicted[0]["label"]
    for command in (["evaluate"], ["attack", "--eps", 0.3, "--samples", 8], ["tune", "--batch", 4]):
        missing = invoke(command[0], run, *command[1:])
        assert missing.exit_code == 2, missing.output
        assert "cannot read 'stored-digits'" in missing.output
    evaluated = json.loads(invoke("evaluate", run, "--root", root, "--json").stdout)
    assert evaluated["samples"] == 40
    assert evaluated["accuracy"] == eq.evaluate(run, root=root).accuracy > 0.5
    (row,) = listed("attack", run, "--eps", 0.3, "--samples", 8, "--root", root)
    assert row["samples"] == 8
    (compared,) = listed("compare", run, "--evaluate", "--root", root)
    assert compared["test_accuracy"] == evaluated["accuracy"]


def test_run_without_stored_facts_needs_its_data_set(run: Path, root: Path) -> None:
    """Earlier versions did not write run.json."""
    (run / "run.json").unlink()
    with pytest.raises(MissingDataError, match="cannot read 'stored-digits'"):
        eq.load(run)
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("root: null", f"root: {root}")
    )
    assert eq.load(run).images.image_shape == (1, 8, 8)


def test_attack_of_image_files(run: Path, digits: list[Path], tmp_path: Path) -> None:
    arguments = (run, *digits, "--eps", 2, "--output", tmp_path / "attacked")
    attacked = listed("attack", *arguments)
    predicted = [p["label"] for p in listed("predict", run, *digits)]
    assert [f["before"] for f in attacked] == [f["label"] for f in attacked] == predicted
    assert any(f["changed"] for f in attacked)
    after = listed("predict", run, *(f["attacked"] for f in attacked))
    for f, file, again in zip(attacked, digits, after, strict=True):
        assert f["changed"] == (f["after"] != f["before"])
        assert f["steps"] == 20
        assert f["evaluations"] > 20
        assert f["after_in_file"] == again["label"]
        with Image.open(file) as original, Image.open(f["attacked"]) as changed:
            change = (np.asarray(original, float) - np.asarray(changed, float)) / 255
        assert 0 < np.linalg.norm(change) <= f["distance"] <= 2 + 1e-6
    refused = invoke("attack", *arguments)
    assert refused.exit_code == 2
    assert "exists; replace it with --overwrite" in refused.output
    assert invoke("attack", *arguments, "--overwrite").exit_code == 0


def test_attack_uses_the_given_label(run: Path, digits: list[Path]) -> None:
    """Images that are already misclassified are not changed."""
    predicted = listed("predict", run, digits[0])[0]["label"]
    other = "one" if predicted != "one" else "two"
    (attacked,) = listed("attack", run, digits[0], "--eps", 0.01, "--label", other)
    assert (attacked["label"], attacked["before"], attacked["changed"]) == (
        other,
        predicted,
        False,
    )
    unknown = invoke("attack", run, digits[0], "--eps", 1, "--label", "eleven")
    assert unknown.exit_code == 2
    assert "'eleven' is not a class of the run; its classes are zero, one" in unknown.output
    table = invoke("attack", run, digits[0], "--eps", 2, "--method", "all")
    assert table.exit_code == 0, table.output
    assert all(word in table.output for word in ("pgd", "jiio", "fgsm", "Changed", "Distance"))


def test_interrupted_run_is_used_with_its_last_checkpoint(
    run: Path, digits: list[Path], root: Path
) -> None:
    finished = listed("predict", run, *digits)
    (run / "model.safetensors").unlink()
    with pytest.warns(CheckpointWarning, match="is not finished: .* after epoch 2 of 2"):
        assert listed("predict", run, *digits) == finished
    shutil.rmtree(run / "checkpoints/epoch-00002")
    with pytest.warns(CheckpointWarning, match="after epoch 1 of 2"):
        first = eq.load(run)
    stored = read_weights(run / "checkpoints/epoch-00001/model.safetensors")
    assert all(torch.equal(first.state_dict()[name], stored[name]) for name in stored)
    with pytest.warns(CheckpointWarning, match="after epoch 1 of 2"):
        evaluated = invoke("evaluate", run, "--root", root, "--json")
    assert evaluated.exit_code == 0, evaluated.output


def test_damaged_checkpoint_is_skipped(run: Path) -> None:
    (run / "model.safetensors").unlink()
    weights = run / "checkpoints/epoch-00002/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with (
        pytest.warns(CheckpointWarning, match="epoch-00002 cannot be read"),
        pytest.warns(CheckpointWarning, match="after epoch 1 of 2"),
    ):
        eq.load(run)


def test_damaged_weights_of_a_finished_run_are_an_error(run: Path) -> None:
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedFileError):
        eq.load(run)


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_top_classes_are_listed(run: Path, digits: list[Path], tmp_path: Path) -> None:
    predicted = listed("predict", run, *digits, "--top", 3)
    for p in predicted:
        assert next(iter(p["top"])) == p["label"]
        confidences = list(p["top"].values())
        assert len(confidences) == 3
        assert confidences == sorted(confidences, reverse=True)
        assert confidences[0] == p["confidence"]
        assert sum(confidences) <= 1 + 1e-6
    table = tmp_path / "predictions.csv"
    written = invoke("predict", run, *digits, "--top", 3, "--csv", table)
    assert written.exit_code == 0, written.output
    assert f"Written: {table}" in written.output
    assert "Other classes" in written.output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    for row, p in zip(rows, predicted, strict=True):
        names = [row["class"], row["class_2"], row["class_3"]]
        assert (row["file"], names) == (p["file"], list(p["top"]))
        assert float(row["confidence_3"]) == list(p["top"].values())[2]
        assert (int(row["iterations"]), row["converged"]) == (p["iterations"], "True")
    printed = invoke("predict", run, *digits, "--top", 3, "--csv", "-")
    assert printed.stdout == table.read_text()
    before = table.read_bytes()
    again = invoke("predict", run, digits[0], "--csv", table)
    assert again.exit_code == 2
    assert "exists; use --overwrite" in again.output
    assert table.read_bytes() == before
    assert invoke("predict", run, digits[0], "--csv", table, "--overwrite").exit_code == 0
    assert len(table.read_text().splitlines()) == 2
    both = invoke("predict", run, digits[0], "--csv", "-", "--json")
    assert both.exit_code == 2


def test_unreadable_file_is_skipped(run: Path, digits: list[Path], tmp_path: Path) -> None:
    (tmp_path / "digits/bad.png").write_bytes(b"no image")
    result = invoke("predict", run, tmp_path / "digits", "--csv", tmp_path / "table.csv")
    assert result.exit_code == 1
    assert "1 of 5 images were skipped" in one_line(result.stderr)
    assert "bad.png" in one_line(result.stderr)
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 5


def test_many_files_are_summarized(
    run: Path, digits: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "MAX_ROWS", 3)
    result = invoke("predict", run, *digits)
    assert result.exit_code == 0, result.output
    assert "4 images. Use --csv FILE or --json" in result.output
    assert "digit0.png" not in result.output
    assert len(listed("predict", run, *digits)) == 4


def test_only_the_first_frame_is_used_with_a_warning(
    run: Path, digits: list[Path], tmp_path: Path
) -> None:
    frames = [Image.open(file).convert("P") for file in digits[:2]]
    for name in ("moving.gif", "pages.tiff", "still.gif"):
        rest = [] if name == "still.gif" else frames[1:]
        frames[0].save(tmp_path / name, save_all=True, append_images=rest)
    files = [tmp_path / name for name in ("moving.gif", "pages.tiff", "still.gif")]
    result = invoke("predict", run, digits[0], *files, "--json")
    assert result.exit_code == 0, result.output
    assert len({p["label"] for p in json.loads(result.stdout)}) == 1
    warning = one_line(result.stderr)
    assert "only the first frame or page is used of" in warning
    assert "moving.gif" in warning
    assert "pages.tiff" in warning
    assert "still.gif" not in warning


def test_predictions_are_lazy(run: Path, digits: list[Path], tmp_path: Path) -> None:
    later = tmp_path / "later.png"
    later.write_bytes(b"not yet an image")
    lazy = predictions(run, [*digits[:2], later], batch_size=1)
    assert isinstance(lazy, Iterator)
    assert next(lazy).file == str(digits[0])
    shutil.copy(digits[2], later)
    assert [p.file for p in lazy] == [str(digits[1]), str(later)]
    with pytest.raises(ValueError, match="top"):
        predictions(run, digits, top=0)


def test_generator_draws_samples_without_its_data_set(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "model": {
            "name": "opteq-decoder",
            "options": {"latent_dim": 4, "channels": 4, "width": 4, "head_channels": 4},
        },
        "data": {"name": "stored-digits"},
        "training": {"epochs": 1, "batch_size": 64},
        "task": {"name": "generator", "options": {"iterations": 2, "evaluation_iterations": 3}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    monkeypatch.setenv("EQUILIBRIA_DATA", str(root))
    run = tmp_path / "run"
    assert invoke("train", tmp_path / "recipe.yaml", "--output", run).exit_code == 0
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    options = ("--samples", 12, "--output", tmp_path / "samples.png")
    result = invoke("generate", run, *options, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["fitted_to"], figures["reconstructions"]) == (600, [])
    assert "the samples are not compared with images" in one_line(result.stderr)
    assert (tmp_path / "samples.png").is_file()
    assert not (tmp_path / "samples-reconstructions.png").exists()
    (run / "latents.safetensors").unlink()
    nothing = invoke("generate", run, *options, "--overwrite")
    assert nothing.exit_code == 2
    assert "give the folder of its data set with --root" in one_line(nothing.stderr)


def test_certify_works_on_files_and_test_images(
    run: Path, digits: list[Path], root: Path, tmp_path: Path
) -> None:
    """Predictions with --certified stop early and give the same classes."""
    certified = listed("certify", run, *digits)
    assert [f["image"] for f in certified] == [str(path) for path in digits]
    assert [f["label"] for f in certified] == [p["label"] for p in listed("predict", run, *digits)]
    for f in certified:
        assert f["certified"]
        assert f["radius"] > 0
        assert f["margin"] > f["margin_error"] > 0
        assert (f["true_label"], f["reason"]) == (None, "")
    table = tmp_path / "certified.csv"
    written = invoke("certify", run, *digits, "--csv", table)
    assert written.exit_code == 0, written.output
    for part in ("Class certified", "Radius, weighted", "Fenchel gap", f"Written: {table}"):
        assert part in one_line(written.output)
    assert "Radius, pattern" not in one_line(written.output)
    assert "Radius, pattern" in invoke("certify", run, *digits, "--refine").output
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["radius"]) for row in rows] == [f["radius"] for f in certified]
    again = invoke("certify", run, *digits, "--csv", table)
    assert (again.exit_code, "exists; use --overwrite" in again.output) == (2, True)

    tested = listed("certify", run, "--root", root, "--samples", 16)
    assert len(tested) == 16
    assert {f["true_label"] for f in tested} <= set(NAMES)
    missing = invoke("certify", run, "--samples", 4)
    assert (missing.exit_code, "cannot read" in missing.output) == (2, True)

    early = listed("predict", run, *digits, "--certified")
    full = listed("predict", run, *digits)
    assert [p["label"] for p in early] == [p["label"] for p in full]
    assert all(p["certified"] for p in early)
    assert sum(p["iterations"] for p in early) < sum(p["iterations"] for p in full)
    assert full[0]["certified"] is None
    assert "Certified" in invoke("predict", run, digits[0], "--certified").output
    plain, quick = (
        json.loads(invoke("evaluate", run, "--root", root, "--json", *more).stdout)
        for more in ((), ("--certified",))
    )
    assert quick["accuracy"] == plain["accuracy"]
    assert quick["mean_iterations"] < plain["mean_iterations"]
    assert quick["share_certified"] > 0.9
    assert eq.evaluate(run, root=root, certified=True).accuracy == plain["accuracy"]
