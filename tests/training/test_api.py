"""The function train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equilibria.data import load_digits
from equilibria.inference import load
from equilibria.training import EpochMetrics, load_recipe, train

SHORT = ("training.epochs=1", "data.options.train_samples=128", "data.options.test_samples=40")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "run"
    train("digits-opteq", *SHORT, output=folder, device="cpu")
    return folder


def test_train_returns_the_same_model_as_load(run: Path, tmp_path: Path) -> None:
    epochs: list[EpochMetrics] = []
    recipe = load_recipe("digits-opteq", SHORT)
    model = train(recipe, output=tmp_path / "again", device="cpu", on_epoch=epochs.append)
    assert [metrics.epoch for metrics in epochs] == [1]
    images = load_digits().test.images[:5]
    assert not model.training
    assert torch.equal(model(images), load(run)(images))
    with pytest.raises(TypeError, match="overrides need a recipe given by name"):
        train(recipe, "training.epochs=2", output=tmp_path / "other")


def test_progress_is_printed_to_stderr_and_can_be_disabled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("digits-opteq", *SHORT, output=tmp_path / "shown", device="cpu")
    printed = capsys.readouterr()
    assert printed.out == ""
    *summary, epoch = printed.err.splitlines()
    assert [line.split()[0] for line in summary] == [
        *("Model", "Data", "Schedule", "Solver", "Output")
    ]
    assert "opteq-small, 33,098 parameters" in summary[0]
    assert "128 training and 40 test images of 1×8×8, 10 classes" in summary[1]
    assert "1 epoch, batches of 64, adamw, learning rate 0.02 (cosine)" in summary[2]
    assert "Auto to a tolerance of 0.01, gradient OneStep, on cpu" in summary[3]
    assert summary[4].endswith("shown (all settings: config.yaml)")
    assert epoch.startswith("epoch 1/1  loss ")
    train("digits-opteq", *SHORT, output=tmp_path / "silent", device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_run_resumes_only_with_its_recipe(run: Path) -> None:
    before = load(run).state_dict()
    after = train("digits-opteq", *SHORT, output=run, resume=True, device="cpu").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="differs from the given recipe"):
        train("digits-opteq", output=run, resume=True)
