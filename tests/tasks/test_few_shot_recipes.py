"""The recipes of few-shot learning, as a user follows them, on a few small characters."""

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
    shown = invoke("evaluate", run, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert found["episodes"] == 6
    assert found["samples"] == 6 * 4
    assert 0 <= found["accuracy"] <= 1
    assert found["interval"] >= 0
    assert (found["mean_iterations"] is not None) == (method == "jiio")


def test_episodes_need_a_task_of_their_own(tmp_path: Path) -> None:
    write_characters(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: conv4}}\ndata: {{name: omniglot-episodes, root: {tmp_path}, options: "
        "{ways: 2, queries: 1}}\ntraining: {epochs: 1}\n"
    )
    result = invoke("train", recipe, "--output", tmp_path / "run")
    assert result.exit_code != 0
    assert "task.name" in result.output
