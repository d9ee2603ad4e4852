"""What an early exit saves, on runs of a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import equilibria as eq
from studies.early_exit import main


@pytest.mark.parametrize("recipe", ["digits-opteq", "digits-certified"])
def test_evaluations_are_counted_and_classes_compared(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("training.epochs=1", "data.options.train_samples=128", "data.options.test_samples=24")
    eq.train(recipe, *small, output=tmp_path / "run")
    figures = tmp_path / "figures.json"
    asked = ["--samples", "24", "--turns", "1", "--json", str(figures)]
    assert main([str(tmp_path / "run"), *asked]) == 0
    (found,) = json.loads(figures.read_text())
    assert found["different"] == 0
    assert min(found["early"], found["evaluations"]) >= 24
    assert len(found["certified"]) == 3
    assert capsys.readouterr().out.count("| run |") == 2  # the head of the table, and a row
