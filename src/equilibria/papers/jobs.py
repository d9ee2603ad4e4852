"""Jobs: train, evaluate and measure one recipe, and keep the numbers in its folder.

`run_job` runs one job in this process, `run_jobs` runs several in parallel processes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from equilibria import plugins
from equilibria.data import Batches
from equilibria.data.workers import end_with_parent
from equilibria.equilibrium import BatchCouplingWarning
from equilibria.models.registry import parameter_count
from equilibria.papers.measures import EXTRAS, Result
from equilibria.papers.pictures import PICTURES
from equilibria.solvers import ConvergenceWarning
from equilibria.training import EpochMetrics, RunFolder, load_weights
from equilibria.training.experiment import Experiment
from equilibria.training.files import json_text, take_lock, write_atomically
from equilibria.training.processes import denormals_as_zero
from equilibria.training.recipe import recipe_from_data

HASH_DIGITS = 10


@dataclass(frozen=True)
class Job:
    """A resolved recipe, including its seed, and what to measure after the training.

    Attributes:
        recipe: The recipe as data.
        folder: Folder of the run; its name depends on the recipe only.
        extras: Names of additional measurements (`measures.EXTRAS`).
        pictures: Names of pictures to draw (`pictures.PICTURES`).

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq").as_data()
        >>> from equilibria.papers.jobs import make_job
        >>> job = make_job(recipe, seed=3, runs=Path("runs"))
        >>> job.recipe["training"]["seed"]
        3
    """

    recipe: Mapping[str, Any]
    folder: Path
    extras: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()

    def picture(self, name: str) -> Path:
        """Return the path of a picture in the folder of the job."""
        return self.folder / f"{name}.png"

    def result(self) -> Result | None:
        """Return the recorded result, or None if a measurement or a picture is missing."""
        if not all(self.picture(name).is_file() for name in self.pictures):
            return None
        result: Result = {}
        for name in ("result", *self.extras):
            file = self.folder / f"{name}.json"
            if not file.is_file():
                return None
            result |= json.loads(file.read_text(encoding="utf-8"))
        return result


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a job: a result or an error.

    Attributes:
        job: The job.
        result: Its numbers, or None if it failed.
        error: Type and message of the error; empty if it succeeded.

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq").as_data()
        >>> from equilibria.papers.jobs import JobOutcome, make_job
        >>> job = make_job(recipe, seed=0, runs=Path("runs"))
        >>> JobOutcome(job, None, error="the disk is full").result is None
        True
    """

    job: Job
    result: Result | None
    error: str = ""


def make_job(
    recipe: Mapping[str, Any],
    seed: int,
    runs: Path,
    *,
    extras: tuple[str, ...] = (),
    pictures: tuple[str, ...] = (),
    root: Path | None = None,
) -> Job:
    """Create the job of a recipe and a seed; equal resolved recipes have the same folder.

    Args:
        recipe: Recipe as data.
        seed: Seed, which replaces that of the recipe.
        runs: Folder that contains the folders of all runs.
        extras: Names of additional measurements.
        pictures: Names of pictures to draw.
        root: Folder of the data sets; by default that of the recipe.

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq").as_data()
        >>> from equilibria.papers.jobs import make_job
        >>> jobs = [make_job(recipe, seed, Path("runs")) for seed in (0, 0, 1)]
        >>> jobs[0].folder == jobs[1].folder, jobs[0].folder == jobs[2].folder
        (True, False)
    """
    seeded = {**recipe, "training": {**recipe["training"], "seed": seed}}
    resolved = recipe_from_data(seeded).as_data()
    content = json.dumps({**resolved, "about": ""}, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]
    name = f"{resolved['data']['name']}-{resolved['model']['name']}-seed{seed}-{digest}"
    if root is not None:
        resolved["data"]["root"] = str(root)
    return Job(resolved, runs / name, extras, pictures)


@denormals_as_zero()
def run_job(
    job: Job,
    device: torch.device,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
) -> Result:
    """Run what is missing of a job. An interrupted training resumes from its last checkpoint."""
    with _exclusive(job.folder), warnings.catch_warnings():
        # The table already shows the share that converged and names the coupling.
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", BatchCouplingWarning)
        finished = job.result()
        if finished is not None:
            return finished
        experiment = Experiment.of(recipe_from_data(job.recipe))
        _train_and_evaluate(job.folder, experiment, device, on_epoch)
        with experiment.solving():
            for name in job.extras:
                file = job.folder / f"{name}.json"
                if not file.is_file():
                    _write(file, EXTRAS[name](experiment, device))
            for name in job.pictures:
                if not job.picture(name).is_file():
                    write_atomically(job.picture(name), PICTURES[name](experiment, device))
    result = job.result()
    assert result is not None
    return result


def attempt(
    job: Job,
    device: torch.device,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
) -> JobOutcome:
    """Run a job and return its outcome; an exception becomes an error message."""
    try:
        return JobOutcome(job, run_job(job, device, on_epoch))
    except Exception as error:
        return JobOutcome(job, None, f"{type(error).__name__}: {error}")


def run_jobs(jobs: Sequence[Job], workers: int) -> Generator[JobOutcome, None, None]:
    """Run jobs in parallel on the CPU and yield their outcomes as they finish.

    A job that fails, or whose process dies, has an error as its outcome; the others continue. When
    the caller stops iterating, the processes are terminated; their checkpoints remain. The pools of
    the standard library do not report which job a dead process was running. Here every process has
    its own pipe, so its job is known.

    Args:
        jobs: The jobs.
        workers: Number of processes; each uses one thread.
    """
    waiting = list(jobs)
    pool: list[_Worker] = []
    try:
        while waiting or pool:
            while waiting and len(pool) < workers:
                pool.append(_Worker(waiting.pop(0)))
            for connection in wait([worker.connection for worker in pool]):
                worker = next(w for w in pool if w.connection is connection)
                yield worker.outcome()
                if waiting and worker.alive:
                    worker.give(waiting.pop(0))
                else:
                    pool.remove(worker)
                    worker.end()
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """A process and its current job."""

    def __init__(self, job: Job) -> None:
        # A fork may hang, because torch has started threads in this process.
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        sources = [parts.source for parts in plugins.imported()]
        self.process = context.Process(target=_work, args=(other, sources), daemon=True)
        self.process.start()
        other.close()
        self.alive = True
        self.give(job)

    def give(self, job: Job) -> None:
        self.job = job
        self.connection.send(job)

    def outcome(self) -> JobOutcome:
        try:
            outcome: JobOutcome = self.connection.recv()
        except (EOFError, OSError):
            self.alive = False
            self.process.join()
            code = self.process.exitcode
            return JobOutcome(self.job, None, f"the process of this job died (exit code {code})")
        return outcome

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _work(connection: Connection, sources: Sequence[str]) -> None:
    """Run jobs from a pipe until its other end closes."""
    # Ctrl-C goes to the parent, which terminates this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)
    plugins.import_parts(sources)
    while True:
        try:
            connection.send(attempt(connection.recv(), torch.device("cpu")))
        except (EOFError, OSError):  # the parent has closed its end
            return


def _train_and_evaluate(
    folder: Path,
    experiment: Experiment,
    device: torch.device,
    on_epoch: Callable[[EpochMetrics], None] | None,
) -> None:
    file, run, recipe = folder / "result.json", RunFolder(folder), experiment.recipe
    if file.is_file():
        load_weights(experiment.model, run.weights)
        experiment.model.to(device)
        return
    run = RunFolder.opened(folder, recipe.as_data(), experiment.facts(), resume=True)
    history = experiment.train(run, device, on_epoch=on_epoch)
    # Evaluate in batches of the training's size: models that couple samples are trained for it, and
    # large images fit into memory.
    batches = Batches(experiment.test, recipe.training.batch_size)
    with experiment.solving():
        evaluation = experiment.task.evaluate(experiment.model, batches)
    solves = evaluation.solves
    cpu_seconds = sum(metrics.cpu_seconds for metrics in history)
    result: Result = {
        "parameters": parameter_count(experiment.model),
        "samples": evaluation.samples,
        **evaluation.figures,
        "loss": evaluation.loss,
        "share_converged": solves.share_converged,
        "mean_iterations": solves.mean_iterations,
        "mean_residual": float(solves.residuals.mean()) if len(solves.residuals) else None,
        "training_accuracy": history[-1].accuracy,
        "cpu_seconds": cpu_seconds,
        "training_minutes": cpu_seconds / 60,
        "seconds": sum(metrics.seconds for metrics in history),
    }
    _write(file, result)
    shutil.rmtree(run.checkpoints, ignore_errors=True)


def _write(file: Path, result: Result) -> None:
    write_atomically(file, f"{json_text(result, indent=1)}\n".encode())


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, so that a second call waits until the first has finished it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder.parent / f".{folder.name}.lock", wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
