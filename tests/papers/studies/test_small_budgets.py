"""The study of models with few parameters, on the embedded digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equilibria.papers.studies import small_budgets
from equilibria.papers.studies.study import Work


@pytest.mark.parametrize("family", small_budgets.FAMILIES, ids=lambda family: family.title)
@pytest.mark.parametrize("budget", small_budgets.BUDGETS)
def test_every_family_matches_every_budget(family: small_budgets.Family, budget: int) -> None:
    model = family.recipe(budget)["model"]
    width = model["options"]["channels"]
    count = family.parameters(width if isinstance(width, int) else width[0])
    assert count == pytest.approx(budget, rel=0.15)


@pytest.mark.slow
def test_study_writes_its_results_and_reuses_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_budgets, "DATA", {"name": "digits", "options": {"train_samples": 64}})
    monkeypatch.setattr(small_budgets, "TRAINING", {**small_budgets.TRAINING, "epochs": 1})
    study, messages = small_budgets.STUDY, list[str]()
    given = ["budgets=3000", 'families=["ResNet, 1 block", OptEq]']
    settings = study.configure(given, seeds=2)
    assert study.carry_out(settings, Work(tmp_path, messages.append)).is_complete
    assert messages[-1].startswith("4/4")
    text = (tmp_path / "small-budgets.md").read_text()
    assert "ResNet, 1 block" in text
    assert "OptEq" in text
    rows = json.loads((tmp_path / "small-budgets.json").read_text())["rows"]
    assert [len(row["runs"]) for row in rows] == [2, 2]
    assert (tmp_path / "small-budgets.png").stat().st_size > 1000
    messages.clear()
    assert study.carry_out(settings, Work(tmp_path, messages.append)).is_complete
    assert not messages
