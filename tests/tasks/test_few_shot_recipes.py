"""The recipes of few-shot learning on a few small characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.test_episodes import write_characters
from tests.program import invoke

SMALL = [
    "data.options.ways=2",
    "data.options.queries=2",
    "data.options.episodes=5",
    "data.options.test_episodes=6",
    "data.options.size=16",
    "data.options.validation_share=0.5",
    "data.validation=own",
    "model.options.channels=4",
    "training.epochs=2",
    "training.batch_size=2",
]


@pytest.mark.parametrize("method", ["jiio", "maml", "reptile", "imaml"])
def test_train_and_evaluate(method: str, tmp_path: Path) -> None:
    write_characters(tmp_path)
    run = tmp_path / "run"
    settings = [*SMALL, f"data.root={tmp_path}"]
    if method == "jiio":
        settings += ["model.options.task_size=6", "task.options.iterations=3"]
    result = invoke("train", f"omniglot-{method}", *settings, "--output", run)
    assert result.exit_code == 0, result.output
    assert "epoch 2/2" in result.output
    evaluated = invoke("evaluate", run, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    figures = json.loads(evaluated.output)
    assert figures["episodes"] == 6
    assert figures["samples"] == 6 * 4
    assert 0 <= figures["accuracy"] <= 1
    assert figures["interval"] >= 0
    assert (figures["mean_iterations"] is not None) == (method == "jiio")


def test_episodes_need_a_few_shot_task(tmp_path: Path) -> None:
    write_characters(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: conv4}}\ndata: {{name: omniglot-episodes, root: {tmp_path}, options: "
        "{ways: 2, queries: 1}}\ntraining: {epochs: 1}\n"
    )
    result = invoke("train", recipe, "--output", tmp_path / "run")
    assert result.exit_code != 0
    assert "task.name" in result.output
