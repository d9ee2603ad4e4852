"""The benchmark of input optimization: budgets for equal loss, and a table of ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.joint import first_to_reach, main
from benchmarks.joint_models import MODELS, Images
from benchmarks.joint_problems import JointProblem, Setting


def problem(name: str, folder: Path) -> JointProblem:
    """A problem with a model after one update and noise for images."""
    noise = torch.Generator().manual_seed(0)
    images = torch.rand(4, 1, 28, 28, generator=noise)
    data = Images(images, torch.arange(4), images, torch.arange(4))
    return JointProblem(name, Setting(None, folder, steps=dict.fromkeys(MODELS, 1)), data)


@pytest.mark.parametrize("name", ["OptEq classifier", "OptEq decoder"])
def test_budget_is_raised_until_the_loss_is_reached(name: str, tmp_path: Path) -> None:
    case = problem(name, tmp_path)
    start = case.true_loss(case.x0)
    easy = first_to_reach(case, "auto", start, (1, 8))
    assert easy.method.iterations == 1
    assert easy.label == ("momentum" if case.attack else "secant")
    assert easy.loss < start
    further = first_to_reach(case, "auto", easy.loss - 1e-6, (1, 8))
    assert further.method.iterations == 8
    assert further.loss < easy.loss
    impossible = first_to_reach(case, "auto", -1e9, (1, 8))
    assert impossible.loss > -1e9
    assert (tmp_path / f"{name.replace(' ', '-').lower()}-1.pt").exists()


@pytest.mark.slow
def test_command_compares_with_all_baselines(
    real_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "joint.json"
    words = ["--quick", "--data", str(real_data), "--repeats", "1", "--json", str(file)]
    try:
        assert main([*words, "--problems", "OptEq classifier", "--engines", "auto"]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "÷ cold" in printed
    assert "times faster at equal true loss" in printed
    both = json.loads(file.read_text())
    names = ["gradient, cold", "gradient, warm", "gradient, cold, Broyden 18", "momentum"]
    for image_set, rows in ((1, both[:4]), (2, both[4:])):
        assert [row["engine"] for row in rows] == names
        assert all(row["image_set"] == image_set for row in rows)
        assert rows[2]["evaluations"] > rows[0]["evaluations"] > rows[1]["evaluations"]
        assert all(row["seconds"] > 0 for row in rows)
        assert all((row["peak_mebibytes"] is not None) == (image_set == 1) for row in rows)
