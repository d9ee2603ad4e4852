"""`equilibria train` with several processes: start, failure, and results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed
from typer.testing import CliRunner

import equilibria
from equilibria.cli import app
from equilibria.training import RunFolder
from tests.cli.failing_trainings import ENDED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
]

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 12
# With a smooth activation and no augmentation, two processes agree with one up to rounding.
RECIPE = [
    "digits-opteq",
    "--no-report",
    f"training.epochs={EPOCHS}",
    "training.tolerance=1e-6",
    "data.options.train_samples=201",
    "data.augmentation=[]",
    "data.validation=0.2",
    "model.options.channels=8",
    "model.options.width=8",
    "model.options.activation=softplus",
]
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 in the format of /proc/net on a little-endian machine."""
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
    """Return the training processes, children of `parent`, by rank."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return sorted(
        pid for pid, command in commands.items() if "spawn_main" in command or "train" in command
    )


def listening(processes: list[int]) -> list[str]:
    """Return the addresses on which processes listen, in the format of the kernel."""
    addresses = []
    for pid in processes:
        sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                    addresses.append(fields[1].split(":")[0])
    return addresses


def kill_one(process: subprocess.Popen[str], folder: Path, rank: int) -> tuple[str, str]:
    """Kill a worker after two more epochs, and return the output of the others."""
    before = len(RunFolder(folder).read_metrics())
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if len(RunFolder(folder).read_metrics()) > before + 1:
            if "--devices" in process.args:
                addresses = listening([process.pid, *workers(process.pid)])
                assert set(addresses) <= LOOPBACK, "listens on the network"
            os.kill(workers(process.pid)[rank], signal.SIGKILL)
            break
        time.sleep(0.01)
    try:
        return process.communicate(timeout=240)
    finally:
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
def test_run_with_a_killed_process_ends_and_can_be_resumed(tmp_path: Path) -> None:
    """A run that is killed once per launcher ends with the metrics of a single process."""
    folder = tmp_path / "together"
    first = start(BY_DEVICES, folder)
    _, errors = kill_one(first, folder, rank=1)
    assert first.returncode == 1
    assert errors.count("Error: process 2 of 2 was ended by SIGKILL") == 1
    assert "--resume" in errors
    assert "Traceback" not in errors

    second = start(BY_TORCHRUN, folder)
    output, errors = kill_one(second, folder, rank=0)
    assert second.returncode != 0
    assert "SIGKILL" in errors  # printed by torchrun
    assert output.count("opteq-small") == 1, "only one process prints the summary"

    last = start(BY_DEVICES, folder)
    output, errors = last.communicate(timeout=240)
    assert last.returncode == 0, errors
    assert output.count(f"epoch {EPOCHS}/{EPOCHS}") == 1
    assert "with 2 processes" in " ".join(output.split())
    assert "of 450)" in output  # each test image once

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


def test_errors_are_printed_once(tmp_path: Path) -> None:
    cases: list[tuple[list[str] | None, int, str]] = [
        (["model.options.chanels=3"], 2, "did you mean 'channels'"),
        (["training.learning_rate=1e30", "training.optimizer=sgd"], 1, "lower the learning rate"),
        (None, 70, "KeyError: 'error of the second process'"),
    ]
    source = Path(equilibria.__file__).parents[1]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.cli.failing_trainings",
            json.dumps([settings for settings, *_ in cases]),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    outputs, codes = zip(*re.findall(rf"(.*?){ENDED}(\d+)\n", ended.stderr, re.DOTALL), strict=True)
    assert [int(code) for code in codes] == [code for _, code, _ in cases]
    for (*_, message), text in zip(cases, outputs, strict=True):
        assert text.count(message) == 1
        assert "Traceback" not in text


def test_wrong_arguments_are_errors_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(*arguments: str) -> str:
        command = ["train", *arguments, "--output", str(tmp_path / "run"), "--devices", "2"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    assert "did you mean 'digits-opteq'" in error_of("digits-optq")
    assert "'cpu' or 'cuda'" in error_of("digits-opteq", "--device", "mps")
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "torchrun has started 4 processes" in error_of("digits-opteq")
    assert not (tmp_path / "run").exists()
