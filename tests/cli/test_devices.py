"""`equilibria train` by several processes, as a user starts them and as they end."""

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
from tests.cli.stumbling import ENDED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
]

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 12
# A smooth activation, no chance: two processes then do as one does, whatever is rounded.
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
"""127.0.0.1 and ::1, as they stand in /proc/net on a little-endian machine."""
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


def listening(processes: list[int]) -> list[str]:
    """The addresses at which processes listen, as the kernel writes them."""
    found = []
    for pid in processes:
        sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                    found.append(fields[1].split(":")[0])
    return found


def kill_one(process: subprocess.Popen[str], folder: Path, rank: int) -> tuple[str, str]:
    """Kill a worker after two more epochs; what the others say until they end."""
    before = len(RunFolder(folder).read_metrics())
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if len(RunFolder(folder).read_metrics()) > before + 1:
            if "--devices" in process.args:
                addresses = listening([process.pid, *workers(process.pid)])
                assert set(addresses) <= LOOPBACK, "nothing listens on the network"
            os.kill(workers(process.pid)[rank], signal.SIGKILL)
            break
        time.sleep(0.01)
    try:
        return process.communicate(timeout=240)
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
    assert said.count("opteq-small") == 1, "the summary of one process"

    last = start(BY_DEVICES, folder)
    said, told = last.communicate(timeout=240)
    assert last.returncode == 0, told
    assert said.count(f"epoch {EPOCHS}/{EPOCHS}") == 1
    assert "with 2 processes" in " ".join(said.split())
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


def test_every_error_is_told_once(tmp_path: Path) -> None:
    cases: list[tuple[list[str] | None, int, str]] = [
        (["model.options.chanels=3"], 2, "did you mean 'channels'"),
        (["training.learning_rate=1e30", "training.optimizer=sgd"], 1, "lower the learning rate"),
        (None, 70, "KeyError: 'the second process stumbles'"),
    ]
    source = Path(equilibria.__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cli.stumbling", json.dumps([what for what, *_ in cases])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    told, codes = zip(*re.findall(rf"(.*?){ENDED}(\d+)\n", ended.stderr, re.DOTALL), strict=True)
    assert [int(code) for code in codes] == [code for _, code, _ in cases]
    for (*_, message), text in zip(cases, told, strict=True):
        assert text.count(message) == 1
        assert "Traceback" not in text


def test_mistakes_show_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        command = ["train", *arguments, "--output", str(tmp_path / "run"), "--devices", "2"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    assert "did you mean 'digits-opteq'" in told("digits-optq")
    assert "'cpu' or 'cuda'" in told("digits-opteq", "--device", "mps")
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "torchrun has started 4 processes" in told("digits-opteq")
    assert not (tmp_path / "run").exists()
