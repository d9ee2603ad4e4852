"""The TensorBoard log, read with TensorBoard's reader."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import equilibria
from equilibria.training import EpochMetrics
from equilibria.training.metrics import TensorBoardLog

pytest.importorskip("tensorboard")


def epoch(number: int, loss: float, **others: Any) -> EpochMetrics:
    numbers: dict[str, Any] = {
        "accuracy": 0.5,
        "share_converged": 0.75,
        "mean_iterations": 6.5,
        "gradient_norm": 0.25,
        "learning_rate": 0.125,
        "seconds": 2.0,
        "cpu_seconds": 3.0,
    }
    return EpochMetrics(epoch=number, loss=loss, **{**numbers, **others})


def write(folder: Path, *epochs: EpochMetrics) -> None:
    log = TensorBoardLog(folder)
    for metrics in epochs:
        log.on_epoch(metrics)
    log.close()


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_all_metrics_of_an_epoch_are_written_in_groups(tmp_path: Path) -> None:
    validated = {"validation_accuracy": 0.25, "validation_loss": 1.5, "validation_score": 0.125}
    metrics = epoch(1, 0.5, **validated)
    write(tmp_path, metrics)
    assert read(tmp_path) == {
        "training/loss": {1: 0.5},
        "training/accuracy": {1: 0.5},
        "training/gradient_norm": {1: 0.25},
        "training/learning_rate": {1: 0.125},
        "validation/accuracy": {1: 0.25},
        "validation/loss": {1: 1.5},
        "validation/score": {1: 0.125},
        "solver/share_converged": {1: 0.75},
        "solver/mean_iterations": {1: 6.5},
        "cost/seconds": {1: 2.0},
        "cost/cpu_seconds": {1: 3.0},
    }
    assert len(read(tmp_path)) == len(asdict(metrics)) - 1  # All except the number of the epoch.


def test_missing_metrics_are_omitted(tmp_path: Path) -> None:
    write(tmp_path, epoch(1, 0.5, share_converged=None, mean_iterations=None))
    assert not [tag for tag in read(tmp_path) if tag.startswith(("solver/", "validation/"))]


def test_a_resumed_run_replaces_repeated_epochs(tmp_path: Path) -> None:
    write(tmp_path, *(epoch(number, 4.0) for number in (1, 2, 3, 4)))
    write(tmp_path, epoch(3, 2.0), epoch(4, 1.0), epoch(5, 0.5))
    assert read(tmp_path)["training/loss"] == {1: 4.0, 2: 4.0, 3: 2.0, 4: 1.0, 5: 0.5}


def test_a_new_run_in_the_folder_starts_over(tmp_path: Path) -> None:
    write(tmp_path, *(epoch(number, 4.0) for number in (1, 2, 3)))
    write(tmp_path, epoch(1, 0.5))
    assert read(tmp_path)["training/loss"] == {1: 0.5}


def test_an_epoch_can_be_read_before_the_run_ends(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    for number in (1, 2, 3):
        log.on_epoch(epoch(number, 0.5))
        assert list(read(tmp_path)["cost/cpu_seconds"])[-1] == number
    log.close()


def test_a_log_without_an_epoch_writes_nothing(tmp_path: Path) -> None:
    TensorBoardLog(tmp_path / "events").close()
    assert not (tmp_path / "events").exists()


def test_without_tensorboard_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None makes the import fail, even if an earlier test has imported the package.
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=r"pip install equilibria\[tensorboard\]"):
        TensorBoardLog(tmp_path)


def test_tensorboard_is_imported_only_by_a_log() -> None:
    code = (
        "import sys, equilibria.training.metrics; "
        "sys.exit('tensorboard' in sys.modules or 'torch.utils.tensorboard' in sys.modules)"
    )
    source = str(Path(equilibria.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
