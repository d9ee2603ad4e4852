"""Runs survive crashes, refused writes, and flipped bits without silent errors."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import equilibria
from equilibria.analysis.compare import read_runs, store_evaluation
from tests.faults import trials

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FLIPS = 504
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def environment() -> dict[str, str]:
    source = str(Path(equilibria.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


@posix
@pytest.mark.parametrize(
    ("trial", "min_events"),
    [
        ("kills", 80),  # kill -9 at any event, then --resume: the same result as without
        ("replaced", 80),  # kill -9 during --overwrite: the old or the new run is intact
        ("refusals", 100),  # a full or read-only disk or too many files, from any event on
    ],
)
def test_no_fault_at_any_event_loses_data(trial: str, min_events: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.trials", trial],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["wrong"] == {}
    assert result["events"] >= min_events
    assert result["states"] >= min_events / 2, "too few different states"


def test_flipped_bit_is_reported_or_harmless(tmp_path: Path) -> None:
    """An undetected flip in the weights can raise a loss from 1.73 to 1.8e35."""
    trials.prepare()
    folder = tmp_path / "run"
    trials.train(folder)
    store_evaluation(folder, {"accuracy": 0.5, "loss": 1.25})

    def used() -> dict[str, Any]:
        """Return all results that are read from the run."""
        (compared,) = read_runs([folder])
        facts = {key: value for key, value in compared.as_data().items() if "seconds" not in key}
        return {**trials.outcome(folder), "compared": trials.plain(facts)}

    whole = used()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    draw = random.Random(0)
    reported = 0
    for trial in range(FLIPS):
        file = files[trial % len(files)]
        content = file.read_bytes()
        times = file.stat()
        bit = draw.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                assert used() == whole, (file, bit)
            except (OSError, ValueError, UserWarning):
                reported += 1
        file.write_bytes(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert used() == whole
    # The older checkpoint is not read while the newer one is intact.
    assert reported > 0.75 * FLIPS


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_process(ended_by: signal.Signals, tmp_path: Path) -> None:
    """SIGINT is ignored, as for background jobs of a script."""
    command = [sys.executable, "-m", "equilibria", "train", "digits-opteq", "--devices", "2"]
    process = subprocess.Popen(
        [*command, "training.epochs=9999", "--device", "cpu", "--output", str(tmp_path / "run")],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # type: ignore[arg-type,return-value]
    )
    workers: list[str] = []
    try:
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [c for c in children if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]
        assert len(workers) == 2
        process.send_signal(ended_by)
        process.wait(60)
        until(lambda: not any(map(is_running, workers)))
    finally:
        process.kill()
        for worker in filter(is_running, workers):
            os.kill(int(worker), signal.SIGKILL)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Any, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
