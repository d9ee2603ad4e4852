"""`equilibria train` by several processes, as a user starts them and as they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from torch import distributed
from typer.testing import CliRunner

import equilibria
from equilibria.cli import app
from equilibria.cli.launch import run_processes
from equilibria.cli.train import TrainingRequest, train_in_group
from equilibria.training import Place, RunFolder, joined_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
]

EPOCHS = 12
# A smooth activation, no chance: two processes then do as one does, whatever is rounded.
RECIPE = [
    "digits-opteq",
    f"training.epochs={EPOCHS}",
    "training.tolerance=1e-6",
    "data.options.train_samples=201",
    "data.augmentation=[]",
    "data.validation=0.2",
    "model.options.channels=8",
    "model.options.width=8",
    "model.options.activation=softplus",
]
BY_DEVICES = ["-m", "equilibria", "train", "--devices", "2"]
BY_TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "equilibria", "train"]


def start(how: list[str], folder: Path) -> subprocess.Popen[str]:
    source = str(Path(equilibria.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *how, *RECIPE, "--output", str(folder), "--resume", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(parent: int) -> list[int]:
    """The processes that train, by rank: the children of the one that was started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return sorted(
        pid for pid, command in commands.items() if "spawn_main" in command or "train" in command
    )


def kill_one(process: subprocess.Popen[str], folder: Path, rank: int) -> tuple[str, str]:
    """Kill a worker after two more epochs; what the others say until they end."""
    before = len(RunFolder(folder).read_metrics())
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if len(RunFolder(folder).read_metrics()) > before + 1:
            os.kill(workers(process.pid)[rank], signal.SIGKILL)
            break
        time.sleep(0.01)
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_a_killed_process_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    """Started both ways and killed once each, a run ends where that of one process does."""
    folder = tmp_path / "together"
    first = start(BY_DEVICES, folder)
    _, told = kill_one(first, folder, rank=1)
    assert first.returncode == 1
    assert told.count("Error: process 2 of 2 was ended by SIGKILL") == 1
    assert "--resume" in told
    assert "Traceback" not in told

    second = start(BY_TORCHRUN, folder)
    said, told = kill_one(second, folder, rank=0)
    assert second.returncode != 0
    assert "SIGKILL" in told  # torchrun says it
    assert said.count("opteq-small") == 2  # the recipe and the line below it, of one process

    last = start(BY_DEVICES, folder)
    said, told = last.communicate(timeout=240)
    assert last.returncode == 0, told
    assert said.count(f"epoch {EPOCHS}/{EPOCHS}") == 1
    assert "by 2 processes" in " ".join(said.split())
    assert "of 450)" in said  # every test image once

    alone = tmp_path / "alone"
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["train", *RECIPE, "--output", str(alone), "--device", "cpu"])
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    metrics = [RunFolder(run).read_metrics() for run in (folder, alone)]
    assert len(metrics[0]) == EPOCHS
    for together, single in zip(*metrics, strict=True):
        for name in ("loss", "validation_loss", "gradient_norm"):
            assert together[name] == pytest.approx(single[name], rel=1e-4), name
        assert together["validation_accuracy"] == single["validation_accuracy"]


def fail_in_turn(place: Place, folder: Path) -> None:
    """A wrong option, a loss that is not finite, and an error of the second process alone."""
    assert place.meeting_point is not None
    torch.set_num_threads(1)
    for number, (changes, code) in enumerate(
        [
            (["model.options.chanels=3"], 2),
            (["training.learning_rate=1e30", "training.optimizer=sgd"], 1),
        ]
    ):
        request = TrainingRequest("digits-opteq", changes, folder / str(number), False, "cpu")
        other = replace(place, meeting_point=place.meeting_point.with_name(f"meeting-{number}"))
        with pytest.raises(typer.Exit) as end:
            train_in_group(other, request)
        assert end.value.exit_code == code
    with joined_group(place, torch.device("cpu")) as group:
        if group.rank == 1:
            raise KeyError("the second process stumbles")
        group.total(torch.zeros(1))


def test_every_error_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end:
        run_processes(2, fail_in_turn, tmp_path)
    assert end.value.exit_code == 1
    told = capfd.readouterr().err
    assert told.count("did you mean 'channels'") == 1
    assert told.count("lower the learning rate") == 1
    assert told.count("KeyError: 'the second process stumbles'") == 1
    assert told.count("Traceback") == 1


def test_mistakes_show_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        command = ["train", *arguments, "--output", str(tmp_path / "run"), "--devices", "2"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    assert "did you mean 'digits-opteq'" in told("digits-optq")
    assert "cpu or cuda" in told("digits-opteq", "--device", "mps")
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "torchrun has started 4 processes" in told("digits-opteq")
    assert not (tmp_path / "run").exists()
