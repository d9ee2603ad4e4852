"""The commands report, explain, and attack --curve, and the report of train."""

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
    """A run, and the output of its training."""
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    result = invoke(
        "train", "digits-opteq", *SMALL, "model.options.width=8", "--report", "--output", folder
    )
    assert result.exit_code == 0, result.output
    return folder, result.output


@pytest.fixture(scope="module")
def mopteq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mopteq"
    result = invoke("train", "digits-mopteq", *SMALL, "--output", folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    file = tmp_path / "digit.png"
    pixels = (load_digits().test.images[0][0] * 255).to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(file)
    return file


def test_train_writes_a_report(trained: tuple[Path, str]) -> None:
    folder, output = trained
    assert f"Report: {folder / 'report.html'}" in output
    page = Checker((folder / "report.html").read_text(encoding="utf-8"))
    for piece in ("opteq-small on digits", "Certificates", "Training loss", "seed 0"):
        assert piece in page.text
    assert f"equilibria report {folder}" in page.text


def test_train_with_no_report_writes_none(mopteq: Path) -> None:
    assert not (mopteq / "report.html").exists()


def test_failure_of_the_report_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("nothing to draw with")

    monkeypatch.setattr("equilibria.report.write_report", fails)
    folder = tmp_path / "run"
    result = invoke("train", "digits-opteq", *SMALL, "--report", "--output", folder)
    assert result.exit_code == 0, result.output
    assert "the report could not be written: nothing to draw with" in result.stderr
    assert (folder / "model.safetensors").is_file()


def test_report_compares_several_runs(
    trained: tuple[Path, str], mopteq: Path, tmp_path: Path
) -> None:
    page_file = tmp_path / "both.html"
    runs = (trained[0], mopteq)
    result = invoke("report", *runs, "--quick", "--output", page_file)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        f"{run.name}: {step} test images"
        for run in runs
        for step in ("evaluating 12", "certifying 12", "explaining 9")
    ], "all steps are announced"
    text = Checker(page_file.read_text(encoding="utf-8")).text
    for piece in ("Comparison of runs", "opteq", "mopteq", "average H", "may flip"):
        assert piece in text
    again = invoke("report", *runs, "--quick", "--output", page_file)
    assert again.exit_code == 2
    assert "exists; use --overwrite" in again.stderr
    nowhere = invoke("report", tmp_path / "no-run", "--quick")
    assert nowhere.exit_code == 2


def test_explain_works_on_files_and_test_images(
    trained: tuple[Path, str], digit: Path, tmp_path: Path
) -> None:
    folder, _ = trained
    result = invoke("explain", folder, "--samples", 3)
    assert result.exit_code == 0, result.output
    assert "Contributions" in result.output
    assert "input" in result.output
    page = (folder / "explanation.html").read_text(encoding="utf-8")
    assert Checker(page).text.count("∂m/∂term") >= 3
    explained = invoke("explain", folder, digit, "--json")
    assert explained.exit_code == 0, explained.output
    (row,) = json.loads(explained.stdout)
    assert row["image"] == str(digit)
    total = sum(term["source"] for term in row["terms"].values())
    assert total == pytest.approx(row["margin"], rel=0.05, abs=1e-2)
    page_file = tmp_path / "why.html"
    page_file.write_text("mine")
    refused = invoke("explain", folder, digit, "--output", page_file)
    assert refused.exit_code == 2
    assert page_file.read_text() == "mine"
    (tmp_path / "broken.png").write_bytes(b"no picture")
    broken = invoke("explain", folder, tmp_path / "broken.png")
    assert broken.exit_code == 1
    assert "1 of 1 images were skipped" in broken.stderr


def test_page_of_a_pretrained_model_is_written_to_the_current_folder(
    digit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: both commands failed at the end, because they needed a folder of the run."""
    monkeypatch.chdir(tmp_path)
    result = invoke("explain", "--model", "digits-opteq", digit)
    assert result.exit_code == 0, result.output
    page = tmp_path / "digits-opteq-explanation.html"
    assert Checker(page.read_text(encoding="utf-8")).text.count("∂m/∂term") >= 1
    assert invoke("explain", "--model", "digits-opteq", digit).exit_code == 2  # The page exists.
    curve = ("--eps", 0.5, "--curve", "--steps", 2, "--samples", 2, "--json")
    curves = invoke("attack", "--model", "digits-opteq", *curve)
    assert curves.exit_code == 0, curves.output
    assert json.loads(curves.stdout)["samples"] == 2


def test_certify_without_certificates_exits_with_code_1(
    mopteq: Path, trained: tuple[Path, str]
) -> None:
    """MOptEqs with diversity have no certificates."""
    result = invoke("certify", mopteq, "--samples", 3, "--json")
    assert result.exit_code == 1
    assert not any(row["certified"] for row in json.loads(result.stdout))
    assert "no certificate, because the signs of its diversity term" in result.stderr
    assert invoke("certify", trained[0], "--samples", 3).exit_code == 0


def test_attack_curves_are_drawn_and_stored_for_the_report(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = trained
    drawn = tmp_path / "curve.svg"
    options: tuple[Any, ...] = ("--eps", 0.5, "--curve", "--steps", 2, "--samples", 4)
    result = invoke("attack", folder, *options, "--draw", drawn)
    assert result.exit_code == 0, result.output
    for piece in ("pgd", "jiio", "fgsm", "certified", "over steps, at eps 0.25", "Without an"):
        assert piece in result.output
    assert b"Accuracy over the distance" in drawn.read_bytes()
    reported = invoke("report", folder, "--quick")
    assert reported.exit_code == 0, reported.output
    page = Checker((folder / "report.html").read_text(encoding="utf-8"))
    assert "Accuracy over the steps" in page.text
    assert "Accuracy under attack: equilibria report" not in page.text
    refused = invoke("attack", folder, *options, "--method", "jiio")
    assert refused.exit_code == 2
    assert "--curve attacks test images by all methods" in refused.stderr
    (folder / "robustness.json").write_text("{}")
    with pytest.warns(UserWarning, match="cannot be read|damaged"):
        assert invoke("report", folder, "--quick").exit_code == 0
