"""`equilibria reproduce` with a small table on digits."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from equilibria.cli.reproduce import reproduce as reproduce_command
from equilibria.papers import Column, PaperTable, Row, carry_out, plan, register_table, table
from equilibria.papers.jobs import make_job, run_job, run_jobs
from equilibria.papers.report import write_index
from equilibria.papers.runner import findings
from equilibria.training import EpochMetrics
from tests.program import invoke

CPU = torch.device("cpu")


def digits(model: str = "opteq-small", epochs: int = 3, **options: Any) -> dict[str, Any]:
    return {
        "model": {"name": model, "options": {"channels": 8, **options}},
        "data": {"name": "digits", "options": {"train_samples": 120, "test_samples": 100}},
        "training": {
            "epochs": epochs,
            "batch_size": 12,
            "learning_rate": 0.02,
            "gradient": "one_step",
        },
    }


def small_table(table_id: str = "digits-t1", **rows: dict[str, Any] | None) -> PaperTable:
    given = rows or {
        "OptEq": digits(width=8),
        "OptEq again": digits(width=8),
        "Unrolled": {
            **digits("deep-opteq-small", widths=[4, 8], gradient={"name": "unrolled", "steps": 3}),
            "training": {"epochs": 2},
        },
        "Other": None,
    }
    return PaperTable(
        id=table_id,
        paper="Digits",
        title="Table 1, a small table",
        columns=(Column(title="Acc.", measure="accuracy"), Column(title="Size")),
        rows=tuple(
            Row(
                label=label,
                paper={"Acc.": "91.2 ± 0.3%", "Size": "5 M"},
                full=recipe,
                quick=recipe,
                missing="there is no such model",
            )
            for label, recipe in given.items()
        ),
        seeds=2,
        quick_remarks=("120 digits instead of 50,000 images.",),
    )


@pytest.fixture
def registered() -> Iterator[PaperTable]:
    made = small_table()
    register_table(made)
    yield made
    del table._tables()[made.id]


def reproduce(output: Path, table_id: str = "digits-t1", **changes: Any) -> int:
    """Run the command and return its exit code."""
    arguments: dict[str, Any] = {
        "table": table_id,
        "quick": True,
        "output": output,
        "workers": 1,
        "device": "cpu",
    }
    try:
        reproduce_command(**{**arguments, **changes})
    except typer.Exit as end:
        return int(end.exit_code)
    return 0


def finished(output: Path) -> dict[str, int]:
    """Return the modification time of each result."""
    files = (output / "runs").glob("*/result.json")
    return {file.parent.name: file.stat().st_mtime_ns for file in files}


@pytest.mark.slow
def test_table_is_reproduced_and_recorded(
    registered: PaperTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = carry_out(plan(registered, "quick", range(2), tmp_path), workers=1, device=CPU)
    next(stopped)
    stopped.close()
    after_stop = finished(tmp_path)
    assert len(after_stop) == 1
    assert not multiprocessing.active_children()

    assert reproduce(tmp_path) == 0
    all_runs = finished(tmp_path)
    assert len(all_runs) == 4, "two recipes with two seeds each"
    assert after_stop.items() <= all_runs.items(), "finished runs are not repeated"
    output = capsys.readouterr().out
    assert "3/3" in output
    assert "91.2 ± 0.3%" in output

    record = json.loads((tmp_path / "digits-t1-quick.json").read_text())
    rows = {row["label"]: row for row in record["rows"]}
    accuracies = [run["accuracy"] for run in rows["OptEq"]["runs"]]
    assert len(accuracies) == 2
    assert all(0.2 < accuracy <= 1 for accuracy in accuracies)
    assert rows["OptEq"]["mean"]["accuracy"] == pytest.approx(sum(accuracies) / 2)
    assert rows["OptEq"]["runs"] == rows["OptEq again"]["runs"]
    assert rows["Unrolled"]["mean"]["mean_iterations"] == 3
    assert rows["Other"]["runs"] == []
    assert (record["setting"], record["seeds"]) == ("quick", [0, 1])

    text = (tmp_path / "digits-t1-quick.md").read_text()
    assert "not the setting of the paper" in text
    assert "120 digits instead of 50,000 images" in text
    assert "equilibria reproduce digits-t1 --quick" in text
    assert "Not run (there is no such model): Other." in text
    assert (tmp_path / "digits-t1-quick.png").read_bytes().startswith(b"\x89PNG")
    index = write_index(tmp_path)
    assert f"[digits-t1]({tmp_path.name}/digits-t1-quick.md)" in index
    assert record["date"] in index

    assert reproduce(tmp_path, dry_run=True) == 0
    shown = capsys.readouterr().out
    assert "(finished)" in shown
    assert "width: 8" in shown
    assert "parameters" in shown
    assert finished(tmp_path) == all_runs


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    whole = run_job(make_job(digits(epochs=4), 0, tmp_path / "whole"), CPU)
    job = make_job(digits(epochs=4), 0, tmp_path / "parts")
    epochs: list[int] = []

    def stop(metrics: EpochMetrics) -> None:
        epochs.append(metrics.epoch)
        if metrics.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job, CPU, stop)
    assert job.result() is None
    result = run_job(job, CPU, stop)
    assert epochs == [1, 2, 3, 4]
    times = ("seconds", "cpu_seconds", "training_minutes")
    assert {k: v for k, v in result.items() if k not in times} == {
        k: v for k, v in whole.items() if k not in times
    }
    assert not (job.folder / "checkpoints").exists()


def test_concurrent_calls_train_a_run_once(tmp_path: Path) -> None:
    job = make_job(digits(epochs=2), 0, tmp_path)
    epochs: list[int] = []
    calls = [
        threading.Thread(target=run_job, args=(job, CPU, lambda m: epochs.append(m.epoch)))
        for _ in range(2)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert epochs == [1, 2]


def test_extras_are_measured_on_finished_runs(tmp_path: Path) -> None:
    run_job(make_job(digits(epochs=1), 0, tmp_path), CPU)
    job = make_job(digits(epochs=1), 0, tmp_path, extras=("efficiency", "features"))
    before = (job.folder / "result.json").stat().st_mtime_ns
    result = run_job(job, CPU)
    assert (job.folder / "result.json").stat().st_mtime_ns == before
    for name in ("inference_seconds", "backward_seconds", "images_per_second", "peak_bytes"):
        assert (result[name] or 0) > 0
    assert (result["feature_size"] or 0) ** 2 <= (result["feature_energy"] or 0)
    assert 0 < (result["feature_correlation"] or 0) < 1
    assert 0 < (result["feature_dependence"] or 0) < 1


def test_failing_row_is_reported_and_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = small_table("digits-t2", Wrong=digits(no_such_option=1), Right=digits(epochs=1))
    register_table(made)
    try:
        assert reproduce(tmp_path, "digits-t2", quick=False, seeds=1) == 1
    finally:
        del table._tables()["digits-t2"]
    output = capsys.readouterr()
    assert "Wrong, seed 0" in output.err
    assert "Right, seed 0, epoch 1/1" in output.out
    text = (tmp_path / "digits-t2.md").read_text()
    assert "The setting of the paper" in text
    assert "Failed: Wrong, seed 0: TypeError" in text
    assert len(finished(tmp_path)) == 1


@pytest.mark.slow
def test_dead_process_is_reported_with_its_job(tmp_path: Path) -> None:
    made = small_table("digits-t3", Long=digits(epochs=10_000), Short=digits(epochs=1))
    planned = plan(made, "quick", [0], tmp_path)

    def kill() -> None:
        folder = planned.jobs["Long", 0].folder
        while not folder.exists():
            time.sleep(0.05)
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = list(run_jobs(planned.unfinished(), workers=1))
    killer.join()
    results = findings(planned, outcomes)
    assert results.failures == {"Long, seed 0": "the process of this job died (exit code -9)"}
    assert list(results.results) == ["Short"]


def test_missing_data_is_reported_before_training(tmp_path: Path) -> None:
    result = invoke("reproduce", "geq-t1b", "--output", tmp_path, "--root", tmp_path)
    assert result.exit_code == 2
    assert "cifar100" in result.stderr
    assert "equilibria datasets get cifar100" in result.stderr
    assert not (tmp_path / "runs").exists()
    result = invoke("reproduce", "geq-t1", "--output", tmp_path)
    assert result.exit_code == 2
    assert "did you mean 'geq-t1" in result.stderr


def test_list_shows_whether_data_is_available(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (tmp_path / "cifar-10-batches-bin" / name).touch()
    reproduce_command(root=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    (columns,) = [line.split() for line in lines if line.strip().startswith("geq-t1a")]
    assert columns[-4:] == ["cifar10", "yes", "cifar10", "yes"]
    (columns,) = [line.split() for line in lines if line.strip().startswith("geq-t5")]
    assert columns[-4:] == ["cifar100", "no", "omniglot", "no"]
