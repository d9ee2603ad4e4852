"""One run of a table: train, evaluate, measure, and keep the numbers in its folder."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equilibria.data import Batches
from equilibria.equilibrium import BatchCouplingWarning
from equilibria.models import parameter_count
from equilibria.papers.efficiency import efficiency
from equilibria.papers.features import features
from equilibria.papers.generation import generation
from equilibria.papers.pictures import costs, generated, restored
from equilibria.papers.restoring import unsupervised_psnr
from equilibria.papers.robustness import attack_times, robustness
from equilibria.papers.searches import inner_loop_times, latent_times
from equilibria.solvers import ConvergenceWarning
from equilibria.training import (
    EpochMetrics,
    Experiment,
    Recipe,
    RunFolder,
    load_weights,
    recipe_from_data,
    write_atomically,
)
from equilibria.training.solves import TrainingSolves

Result = dict[str, float | None]
"""Numbers by name; None where a model has no such number."""

EXTRAS: dict[str, Callable[[Experiment, torch.device], Result]] = {
    "efficiency": efficiency,
    "features": features,
    "robustness": robustness,
    "attack_times": attack_times,
    "latent_times": latent_times,
    "inner_loop_times": inner_loop_times,
    "unsupervised_psnr": unsupervised_psnr,
    "generation": generation,
}
PICTURES: dict[str, Callable[[Experiment, torch.device], bytes]] = {
    "generated": generated,
    "restored": restored,
    "costs": costs,
}
"""What is drawn of a finished run, by name: a PNG."""
DIGITS_OF_HASH = 10


@dataclass(frozen=True)
class Job:
    """A recipe to follow, with its seed in it; `folder` follows from the recipe alone."""

    recipe: Mapping[str, Any]
    folder: Path
    extras: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()

    def picture(self, name: str) -> Path:
        return self.folder / f"{name}.png"

    def result(self) -> Result | None:
        """What an earlier call left, if that was all of it."""
        if not all(self.picture(name).is_file() for name in self.pictures):
            return None
        found: Result = {}
        for name in ("result", *self.extras):
            file = self.folder / f"{name}.json"
            if not file.is_file():
                return None
            found |= json.loads(file.read_text(encoding="utf-8"))
        return found


def make_job(
    recipe: Mapping[str, Any],
    seed: int,
    runs: Path,
    *,
    extras: tuple[str, ...] = (),
    pictures: tuple[str, ...] = (),
    root: Path | None = None,
) -> Job:
    """The run of a recipe with a seed; the same resolved recipe has the same folder."""
    seeded = {**recipe, "training": {**recipe["training"], "seed": seed}}
    resolved = recipe_from_data(seeded).as_data()
    content = json.dumps({**resolved, "about": ""}, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:DIGITS_OF_HASH]
    name = f"{resolved['data']['name']}-{resolved['model']['name']}-seed{seed}-{digest}"
    if root is not None:
        resolved["data"]["root"] = str(root)
    return Job(resolved, runs / name, extras, pictures)


def run_job(
    job: Job,
    device: torch.device,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
) -> Result:
    """Do what is not done yet. An interrupted training goes on from its last checkpoint."""
    with _alone(job.folder), _quiet():
        finished = job.result()
        if finished is not None:
            return finished
        recipe = recipe_from_data(job.recipe)
        experiment = Experiment.of(recipe)
        _train_and_evaluate(job, recipe, experiment, device, on_epoch)
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


def _train_and_evaluate(
    job: Job,
    recipe: Recipe,
    experiment: Experiment,
    device: torch.device,
    on_epoch: Callable[[EpochMetrics], None] | None,
) -> None:
    file = job.folder / "result.json"
    run = RunFolder(job.folder)
    if file.is_file():
        load_weights(experiment.model, run.weights)
        experiment.model.to(device)
        TrainingSolves(experiment.model, recipe.training, samples=0).prepare_evaluation()
        return
    if not run.config.exists():
        run = RunFolder.create(job.folder, recipe.as_data())
    history = experiment.train(run, device, on_epoch=on_epoch)
    # In the batches of the training: what couples the samples of a batch is used to their number,
    # and large images fit into memory.
    batches = Batches(experiment.test, recipe.training.batch_size)
    evaluation = experiment.task.evaluate(experiment.model, batches)
    solves = evaluation.solves
    cpu_seconds = sum(metrics.cpu_seconds for metrics in history)
    residuals = torch.cat(solves.residuals).double() if solves.residuals else None
    result: Result = {
        "parameters": parameter_count(experiment.model),
        "samples": evaluation.samples,
        **evaluation.figures,
        "loss": evaluation.loss,
        "share_converged": solves.share_converged,
        "mean_iterations": solves.mean_iterations,
        "mean_residual": None if residuals is None else float(residuals.mean()),
        "training_accuracy": history[-1].accuracy,
        "cpu_seconds": cpu_seconds,
        "training_minutes": cpu_seconds / 60,
        "seconds": sum(metrics.seconds for metrics in history),
    }
    _write(file, result)
    shutil.rmtree(run.checkpoints, ignore_errors=True)


def _write(file: Path, result: Result) -> None:
    finite = {
        name: value if value is None or math.isfinite(value) else None
        for name, value in result.items()
    }
    write_atomically(file, (json.dumps(finite, indent=1) + "\n").encode())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Where two calls want the same run, the second waits for the first; then it is finished."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """What these warnings say, the table says: the share that converged, the coupling by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", BatchCouplingWarning)
        yield
