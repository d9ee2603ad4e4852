"""Files of a run: whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

import equilibria as eq
from equilibria.training import (
    EpochMetrics,
    RunFolder,
    choose_device,
    load_weights,
    save_weights,
    write_atomically,
)
from equilibria.training.files import atomic_writer


def test_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def half_a_write(path: Path) -> None:
    with atomic_writer(path) as file:
        file.write(b"half of it")
        raise RuntimeError("power cut")


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(RuntimeError, match="power cut"):
        half_a_write(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_first_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="power cut"):
        half_a_write(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("norm", ["bound", "estimate"])
def test_weights_come_back(tmp_path: Path, norm: str) -> None:
    def make() -> torch.nn.Module:
        return eq.create_model("opteq-small", in_channels=1, channels=8, width=8, norm=norm)

    model, copy = make(), make()
    images = torch.rand(3, 1, 8, 8)
    model(images)
    save_weights(model, tmp_path / "model.safetensors", {"model": "opteq-small"})
    if norm == "estimate":
        copy(images)  # The vector of the estimate takes the shape of the first input.
    load_weights(copy, tmp_path / "model.safetensors")
    assert torch.equal(model.eval()(images), copy.eval()(images))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"model": "opteq-small"}


def epoch(number: int) -> EpochMetrics:
    return EpochMetrics(
        epoch=number,
        loss=1.5,
        accuracy=0.5,
        share_converged=None,
        mean_iterations=7.25,
        gradient_norm=1.0,
        learning_rate=0.1,
        seconds=2.0,
    )


def test_metrics_are_one_json_line_an_epoch(tmp_path: Path) -> None:
    run = RunFolder.opened(tmp_path / "run", {"seed": 3})
    run.append_metrics(epoch(1))
    run.append_metrics(epoch(2))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert lines[0]["mean_iterations"] == 7.25
    assert lines[0]["share_converged"] is None
    assert yaml.safe_load(run.config.read_text()) == {"seed": 3}


def test_new_run_replaces_an_earlier_one(tmp_path: Path) -> None:
    first = RunFolder.opened(tmp_path, {"seed": 1})
    first.append_metrics(epoch(1))
    first.report.write_text("<html>")
    second = RunFolder.opened(tmp_path, {"seed": 2})
    assert not second.metrics.exists()
    assert not second.report.exists()
    assert yaml.safe_load(second.config.read_text()) == {"seed": 2}


def test_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "report.html"
    precious.write_text("a year of work")
    with pytest.raises(FileExistsError, match="no earlier run"):
        RunFolder.opened(tmp_path, {})
    assert precious.read_text() == "a year of work"
    with pytest.raises(FileExistsError, match="is a file"):
        RunFolder.opened(precious, {})


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match=r"no device 'abacus' here: use auto or .*cpu"):
        choose_device("abacus")
