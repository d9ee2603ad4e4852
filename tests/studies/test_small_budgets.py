"""The study of few parameters, on the embedded digits: sizes, what is shared, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import small_budgets


@pytest.mark.parametrize("family", small_budgets.FAMILIES, ids=lambda family: family.title)
@pytest.mark.parametrize("budget", small_budgets.BUDGETS)
def test_every_family_comes_near_every_budget(family: small_budgets.Family, budget: int) -> None:
    model = family.recipe(budget)["model"]
    width = model["options"]["channels"]
    count = family.parameters(width if isinstance(width, int) else width[0])
    assert count == pytest.approx(budget, rel=0.15)


@pytest.mark.slow
def test_the_study_runs_writes_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_budgets, "DATA", {"name": "digits", "options": {"train_samples": 64}})
    monkeypatch.setattr(small_budgets, "TRAINING", {**small_budgets.TRAINING, "epochs": 1})
    families = ["--families", "ResNet, 1 block", "OptEq"]
    arguments = ["--output", str(tmp_path), "--budgets", "3000", "--seeds", "2", *families]
    assert small_budgets.main(arguments) == 0
    assert "4/4" in capsys.readouterr().out
    text = (tmp_path / "small-budgets.md").read_text()
    assert "ResNet, 1 block" in text
    assert "OptEq" in text
    rows = json.loads((tmp_path / "small-budgets.json").read_text())["rows"]
    assert [len(row["runs"]) for row in rows] == [2, 2]
    assert (tmp_path / "small-budgets.png").stat().st_size > 1000
    assert small_budgets.main(arguments) == 0
    assert "1/" not in capsys.readouterr().out.split("# Few")[0]
