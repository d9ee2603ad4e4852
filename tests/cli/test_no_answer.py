"""A model whose logits are NaN: said in a line, with an exit code, after what could be found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import equilibria as eq
from equilibria.training import save_weights
from tests.program import invoke
from tests.restoration.test_run_command import AUTOENCODER, NOISE, learned

pytestmark = pytest.mark.filterwarnings("ignore:the model has NaN")
SHORT = ["training.epochs=1", "model.options.channels=4", "model.options.width=4"]


def poison(run: Path) -> Path:
    """The run, as if its last layer had been trained to NaN."""
    model = eq.load(run)
    with torch.no_grad():
        list(model.parameters())[-1].fill_(torch.nan)
    save_weights(model, run / "model.safetensors")
    return run


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "opteq"
    assert invoke("train", "digits-opteq", *SHORT, "--output", folder).exit_code == 0
    return poison(folder)


def test_an_evaluation(broken: Path) -> None:
    result = invoke("evaluate", broken, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["accuracy"] == 0
    assert found["unanswered"] == found["samples"]
    assert f"no answer for {found['samples']} of {found['samples']} samples" in result.stderr
    table = invoke("evaluate", broken)
    assert table.exit_code == 1
    assert "0.00%" in table.stdout


def test_predictions(broken: Path, tmp_path: Path) -> None:
    file = tmp_path / "digit.png"
    Image.new("L", (8, 8), 100).save(file)
    result = invoke("predict", broken, file)
    assert result.exit_code == 1
    assert "no answer" in result.stdout
    assert "nan" not in result.stdout
    assert "1 of 1 images" in result.stderr
    (row,) = json.loads(invoke("predict", broken, file, "--json").stdout)
    assert row["label"] is None
    assert row["confidence"] is None


@pytest.mark.filterwarnings("ignore:the backward solve")
def test_an_attack(broken: Path, tmp_path: Path) -> None:
    options = ("--eps", 0.3, "--steps", 2, "--samples", 12)
    drawn = tmp_path / "attack.png"
    result = invoke("attack", broken, *options, "--method", "all", "--json", "--draw", drawn)
    assert result.exit_code == 1
    for row in json.loads(result.stdout):
        assert (row["accuracy"], row["robust_accuracy"], row["unanswered"]) == (0, 0, 12)
    assert "12 of 12 images" in result.stderr
    assert drawn.is_file()


@pytest.fixture(scope="module")
def restorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = learned(
        tmp_path_factory.mktemp("runs"),
        "restorer",
        model=AUTOENCODER,
        training={"epochs": 1, "batch_size": 32},
        task={"name": "restoration", "options": NOISE},
    )
    return poison(run)


def test_a_restoration(restorer: Path, tmp_path: Path) -> None:
    file = tmp_path / "digit.png"
    Image.new("L", (8, 8), 100).save(file)
    output = ("--output", tmp_path / "drawn")
    result = invoke("restore-run", restorer, file, *output)
    assert result.exit_code == 1
    assert "no answer for 1 of 1 images" in result.stderr
    result = invoke("restore-run", restorer, "--test", 5, "--json", *output)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["unanswered"] == 5
    assert "no answer for 5 of 5 images" in result.stderr


@pytest.mark.parametrize("decay", [".inf", ".nan"])
def test_a_training_that_can_only_end_so(tmp_path: Path, decay: str) -> None:
    change = f"training.weight_decay={decay}"
    result = invoke("train", "digits-opteq", *SHORT, change, "--output", tmp_path / "run")
    assert result.exit_code == 2
    assert "weight_decay must not be negative or infinite" in result.stderr
