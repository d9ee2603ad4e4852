"""The study of early exits, with tiny runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import equilibria as eq
from equilibria.papers.studies.early_exit import STUDY
from equilibria.papers.studies.study import Work


@pytest.mark.parametrize("recipe", ["digits-opteq", "digits-certified"])
def test_study_counts_evaluations_and_compares_classes(recipe: str, tmp_path: Path) -> None:
    small = ("training.epochs=1", "data.options.train_samples=128", "data.options.test_samples=24")
    eq.train(recipe, *small, output=tmp_path / "run")
    settings = STUDY.configure([f"runs={tmp_path / 'run'}", "samples=24", "turns=1"])
    result = STUDY.carry_out(settings, Work(tmp_path))
    (run,) = json.loads((tmp_path / "early-exit.json").read_text())["runs"]
    assert run["different"] == 0
    assert min(run["early"], run["evaluations"]) >= 24
    assert len(run["certified"]) == 3
    assert result.text.count("| run |") == 2  # the header and one row
