"""`report`, `explain`, `attack --curve`, and the page that `train` ends with, as a user calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from equilibria.data import load_digits
from tests.program import invoke
from tests.report.pages import Checker

SMALL = [
    *("training.epochs=1", "model.options.channels=8"),
    *("data.options.train_samples=80", "data.options.test_samples=12"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run, and what training it printed."""
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    made = invoke(
        "train", "digits-opteq", *SMALL, "model.options.width=8", "--report", "--output", folder
    )
    assert made.exit_code == 0, made.output
    return folder, made.output


@pytest.fixture(scope="module")
def mopteq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mopteq"
    made = invoke("train", "digits-mopteq", *SMALL, "--output", folder)
    assert made.exit_code == 0, made.output
    return folder


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    file = tmp_path / "digit.png"
    pixels = (load_digits().test.images[0][0] * 255).to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)
    return file


def test_a_training_ends_with_a_report(trained: tuple[Path, str]) -> None:
    folder, said = trained
    assert f"Report: {folder / 'report.html'}" in said
    page = Checker((folder / "report.html").read_text(encoding="utf-8"))
    for piece in ("opteq-small on digits", "Certificates", "Training loss", "seed 0"):
        assert piece in page.text
    assert f"equilibria report {folder}" in page.text


def test_a_training_without_a_report_writes_none(mopteq: Path) -> None:
    assert not (mopteq / "report.html").exists()


def test_a_report_that_fails_leaves_the_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("nothing to draw with")

    monkeypatch.setattr("equilibria.report.write_report", fails)
    folder = tmp_path / "run"
    made = invoke("train", "digits-opteq", *SMALL, "--report", "--output", folder)
    assert made.exit_code == 0, made.output
    assert "the report could not be written: nothing to draw with" in made.stderr
    assert (folder / "model.safetensors").is_file()


def test_runs_side_by_side(trained: tuple[Path, str], mopteq: Path, tmp_path: Path) -> None:
    place = tmp_path / "both.html"
    runs = (trained[0], mopteq)
    made = invoke("report", *runs, "--quick", "--output", place)
    assert made.exit_code == 0, made.output
    assert made.stderr.splitlines() == [
        f"{run.name}: {step} test images"
        for run in runs
        for step in ("evaluating 12", "certifying 12", "explaining 9")
    ], "it worked for a minute without a word"
    text = Checker(place.read_text(encoding="utf-8")).text
    for piece in ("Runs side by side", "opteq", "mopteq", "average H", "may flip"):
        assert piece in text
    again = invoke("report", *runs, "--quick", "--output", place)
    assert again.exit_code == 2
    assert "exists: --overwrite replaces it" in again.stderr
    nowhere = invoke("report", tmp_path / "no-run", "--quick")
    assert nowhere.exit_code == 2


def test_explanations_of_files_and_of_test_images(
    trained: tuple[Path, str], digit: Path, tmp_path: Path
) -> None:
    folder, _ = trained
    made = invoke("explain", folder, "--samples", 3)
    assert made.exit_code == 0, made.output
    assert "Brought by" in made.output
    assert "input" in made.output
    page = (folder / "explanation.html").read_text(encoding="utf-8")
    assert Checker(page).text.count("what pulled it") == 3
    asked = invoke("explain", folder, digit, "--json")
    assert asked.exit_code == 0, asked.output
    (row,) = json.loads(asked.stdout)
    assert row["image"] == str(digit)
    total = sum(term["source"] for term in row["terms"].values())
    assert total == pytest.approx(row["margin"], rel=0.05, abs=1e-2)
    place = tmp_path / "why.html"
    place.write_text("mine")
    refused = invoke("explain", folder, digit, "--output", place)
    assert refused.exit_code == 2
    assert place.read_text() == "mine"
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = invoke("explain", folder, tmp_path / "broken.png")
    assert broken.exit_code == 1
    assert "1 of 1 images were left out" in broken.stderr


def test_a_model_without_a_folder_leaves_its_page_here(
    digit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both commands looked for a folder of the model's name, after all of their work."""
    monkeypatch.chdir(tmp_path)
    made = invoke("explain", "--model", "digits-opteq", digit)
    assert made.exit_code == 0, made.output
    page = tmp_path / "digits-opteq-explanation.html"
    assert Checker(page.read_text(encoding="utf-8")).text.count("what pulled it") == 1
    assert invoke("explain", "--model", "digits-opteq", digit).exit_code == 2  # It is there.
    curve = ("--eps", 0.5, "--curve", "--steps", 2, "--samples", 2, "--json")
    curves = invoke("attack", "--model", "digits-opteq", *curve)
    assert curves.exit_code == 0, curves.output
    assert json.loads(curves.stdout)["samples"] == 2


def test_certify_ends_with_one_where_nothing_is_certain(
    mopteq: Path, trained: tuple[Path, str]
) -> None:
    """MOptEqs with diversity have no certificates."""
    found = invoke("certify", mopteq, "--samples", 3, "--json")
    assert found.exit_code == 1
    assert not any(row["certified"] for row in json.loads(found.stdout))
    assert "no certificate, because the signs of its diversity term" in found.stderr
    assert invoke("certify", trained[0], "--samples", 3).exit_code == 0


def test_curves_are_measured_drawn_and_kept_for_the_report(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = trained
    drawn = tmp_path / "curve.svg"
    options: tuple[Any, ...] = ("--eps", 0.5, "--curve", "--steps", 2, "--samples", 4)
    made = invoke("attack", folder, *options, "--draw", drawn)
    assert made.exit_code == 0, made.output
    for piece in ("pgd", "jiio", "fgsm", "certified", "over steps, at eps 0.25", "Without an"):
        assert piece in made.output
    assert b"Accuracy over the distance" in drawn.read_bytes()
    kept = invoke("report", folder, "--quick")
    assert kept.exit_code == 0, kept.output
    page = Checker((folder / "report.html").read_text(encoding="utf-8"))
    assert "Accuracy over the steps" in page.text
    assert "Accuracy under attack: equilibria report" not in page.text
    refused = invoke("attack", folder, *options, "--method", "jiio")
    assert refused.exit_code == 2
    assert "--curve attacks test images by all methods" in refused.stderr
    (folder / "robustness.json").write_text("{}")
    with pytest.warns(UserWarning, match="cannot be used|damaged"):
        assert invoke("report", folder, "--quick").exit_code == 0
