"""Tasks by name, including custom tasks in recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from torch import Tensor, nn

from equilibria.tasks import Outcome, Task, create_task, list_tasks
from equilibria.tasks import base as tasks
from tests.program import invoke

ARGUMENTS = (
    "train",
    "digits-opteq",
    "training.epochs=1",
    "data.options.train_samples=64",
    "data.validation=0.25",
)


@dataclass(frozen=True)
class SmallLogits(Task):
    """Task that pulls logits towards a number, without right and wrong predictions."""

    score: ClassVar[str] = "psnr"

    target: float = 0.0

    def training_step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Outcome:
        return Outcome({"loss": (model(inputs) - self.target).square().mean(dim=1)})

    def figures(self, outcome: Outcome) -> dict[str, float | None]:
        return {"psnr": 25.0, "largest_logit": 3.5, "unknown": None}


@pytest.fixture(autouse=True)
def registered_task() -> Iterator[None]:
    tasks.register_task("small-logits", SmallLogits)
    yield
    del tasks._tasks._factories["small-logits"]


def test_recipe_trains_a_custom_task_without_accuracy(tmp_path: Path) -> None:
    option = "task={name: small-logits, options: {target: 2.0}}"
    result = invoke(*ARGUMENTS, option, "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["accuracy"] is None
    assert line["validation_score"] == 25.0
    assert "accuracy" not in result.output.split("epoch")[-1]
    assert "PSNR, mean (dB)" in result.output
    evaluated = json.loads(invoke("evaluate", tmp_path / "run", "--json").output)
    assert evaluated["largest_logit"] == 3.5
    compared = invoke("compare", tmp_path / "run").output
    assert "Test: Largest logit" in compared
    assert "25.00 (epoch 1)" in compared
    assert invoke("runs", tmp_path).exit_code == 0


def test_predict_rejects_a_task_without_classes(tmp_path: Path) -> None:
    invoke(*ARGUMENTS, "task={name: small-logits}", "--output", tmp_path / "run")
    (tmp_path / "a.png").write_bytes(b"")
    result = invoke("predict", tmp_path / "run", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "needs a run that predicts classes" in " ".join(result.output.split())


def test_default_task_follows_from_the_data(tmp_path: Path) -> None:
    for name, options in (("a", "task={}"), ("b", "task={name: classification}")):
        result = invoke(*ARGUMENTS, options, "--output", tmp_path / name)
        assert result.exit_code == 0, result.output
    first, second = (
        json.loads(invoke("evaluate", tmp_path / name, "--json").output) for name in "ab"
    )
    assert first == second


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("task={name: classificaton}", "did you mean 'classification'"),
        ("task.options.eps=1", "task.options needs task.name"),
        (
            "task={name: classification, label_smoothing: 0.1}",
            "to task.options",
        ),
        ("task={name: small-logits, options: {tagret: 1}}", "did you mean 'target'"),
    ],
)
def test_invalid_tasks_are_rejected(tmp_path: Path, option: str, message: str) -> None:
    result = invoke(*ARGUMENTS, option, "--output", tmp_path / "run")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_tasks_are_created_by_name() -> None:
    assert {"classification", "segmentation"} <= set(list_tasks())
    assert create_task("small-logits", target=1.0) == SmallLogits(1.0)
    with pytest.raises(ValueError, match="exists already"):
        tasks.register_task("small-logits", SmallLogits)
