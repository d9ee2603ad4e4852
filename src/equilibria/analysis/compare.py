"""Results, cost, recipes and curves of training runs, for their comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from equilibria.context.caller import warn_caller
from equilibria.data import dataset_card
from equilibria.models import create_model
from equilibria.training import CheckpointWarning, DamagedFileError, Recipe, RunFolder
from equilibria.training.checkpoints import Checkpoints
from equilibria.training.files import (
    check_run_file,
    read_run_text,
    read_weights,
    sealed_json,
    unsealed,
    write_atomically,
)
from equilibria.training.recipe import errors_at
from equilibria.training.sizes import check_file_size, check_model_size

CPU = "cpu_seconds"

EVALUATION_KEYS = frozenset(
    [
        *("model", "data", "parameters", "samples", "accuracy", "mean_iou", "mean_accuracy"),
        *("top5_accuracy", "loss", "mean_iterations", "max_iterations", "share_converged"),
        "max_residual",
    ]
)
"""Keys of stored evaluations that all tasks share; other keys are measures of one task."""

Curve = list[tuple[int, float]]
"""(index in the list of epochs, value) pairs."""


@dataclass(frozen=True)
class ComparedRun:
    """A finished or interrupted run; values that were not measured are None.

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq")
        >>> epochs = ({"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0})
        >>> from equilibria.analysis.compare import ComparedRun
        >>> run = ComparedRun("a", Path("runs/a"), recipe, None, 100, True, epochs, None)
        >>> run.last("loss")
        1.0
    """

    name: str
    """Shortest end of the path that distinguishes the run from the others."""
    folder: Path
    recipe: Recipe
    kind: str | None
    """Kind of the data; None if the data set is not registered."""
    parameters: int | None
    is_finished: bool
    epochs: tuple[Mapping[str, Any], ...]
    """Metrics as stored in the run folder."""
    evaluation: Mapping[str, Any] | None

    def last(self, key: str) -> float | None:
        """Return a metric of the last epoch."""
        return self.epochs[-1].get(key) if self.epochs else None

    def curve(self, key: str) -> Curve:
        """Return a metric over the epochs that have it."""
        return [
            (index, float(line[key]))
            for index, line in enumerate(self.epochs)
            if line.get(key) is not None
        ]

    @property
    def scores(self) -> Curve:
        """Scores on the validation images."""
        return self.curve("validation_score")

    def total(self, key: str) -> float | None:
        """Return the sum of a metric over all epochs; None if an epoch lacks it."""
        values = self.running_total(key)
        return values[-1] if values else None

    def running_total(self, key: str) -> list[float]:
        """Return the sum up to each epoch; empty if the metric is missing or 0 in an epoch."""
        values = [float(line.get(key) or 0) for line in self.epochs]
        return list(accumulate(values)) if all(values) else []

    def as_data(self) -> dict[str, Any]:
        """Return the measures of the run as JSON-compatible data."""
        best = max(self.scores, key=lambda score: score[1], default=None)
        evaluation = self.evaluation or {}
        return {
            "run": self.name,
            "folder": str(self.folder),
            "model": self.recipe.model.name,
            "parameters": self.parameters,
            "data": self.recipe.data.name,
            "state": "finished" if self.is_finished else "interrupted",
            "epochs": len(self.epochs),
            "epochs_asked": self.recipe.training.epochs,
            "loss": self.last("loss"),
            "accuracy": self.last("accuracy"),
            "best_validation_score": None if best is None else best[1],
            "best_epoch": None if best is None else self.epochs[best[0]]["epoch"],
            "last_validation_score": self.scores[-1][1] if self.scores else None,
            "test_accuracy": evaluation.get("accuracy"),
            "test_mean_iou": evaluation.get("mean_iou"),
            "test_figures": {
                name: value
                for name, value in evaluation.items()
                if name not in EVALUATION_KEYS and isinstance(value, float | int)
            },
            "mean_iterations": self.last("mean_iterations"),
            "share_converged": self.last("share_converged"),
            "seconds": self.total("seconds"),
            "cpu_seconds": self.total(CPU),
        }


def score_name(runs: Sequence[ComparedRun]) -> str:
    """Return the name of the validation score of these runs.

    Examples:
        >>> from pathlib import Path
        >>> recipe, empty = eq.training.load_recipe("digits-opteq"), (None, None, False, (), None)
        >>> from equilibria.analysis.compare import ComparedRun, score_name
        >>> score_name([ComparedRun("a", Path("a"), recipe, *empty)])
        'accuracy'
    """
    if any(run.recipe.task.name is not None for run in runs):
        return "score"
    return "mIoU" if any(run.kind == "segmentation" for run in runs) else "accuracy"


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs in some folders.

    Args:
        folders: Folders of runs.

    Returns:
        The runs, in the order of the folders.

    Raises:
        FileNotFoundError: If a folder is not a run.
        ValueError: If there are no folders, or runs that cannot be compared.

    Examples:
        >>> from pathlib import Path
        >>> few = ["data.options.train_samples=64", "training.epochs=1"]
        >>> model = eq.train("digits-opteq", *few, output="runs/read")
        >>> from equilibria.analysis.compare import read_runs
        >>> (run,) = read_runs([Path("runs/read")])
        >>> run.name, run.is_finished
        ('read', True)
    """
    if not folders:
        raise ValueError("there is nothing to compare; give the folders of runs")
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"the run {folder} is given twice; give every run once")
    runs = list(map(_read_run, folders, _short_names(paths)))
    kinds = {run.kind: run for run in runs if run.kind is not None}
    if len(kinds) > 1:
        examples = ", ".join(f"{run.folder} ({kind})" for kind, run in kinds.items())
        raise ValueError(
            f"these runs have different kinds of data: {examples}; compare runs of one kind"
        )
    return runs


def store_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Store the evaluation of a run in its folder; values that are not finite become None.

    Examples:
        >>> from pathlib import Path
        >>> Path("evaluated").mkdir()
        >>> from equilibria.analysis.compare import store_evaluation
        >>> store_evaluation(Path("evaluated"), {"accuracy": 0.98})
        >>> [path.name for path in Path("evaluated").iterdir()]
        ['evaluation.json']
    """
    write_atomically(RunFolder(folder).evaluation, f"{sealed_json(evaluation)}\n".encode())


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the recipe keys that differ, with one value per run (None if the run lacks the key).

    Examples:
        >>> from pathlib import Path
        >>> longer = eq.training.load_recipe("digits-opteq", ["training.epochs=90"])
        >>> recipes = [eq.training.load_recipe("digits-opteq"), longer]
        >>> empty = (None, None, False, (), None)
        >>> from equilibria.analysis.compare import ComparedRun, differing_settings
        >>> runs = [ComparedRun("a", Path("a"), recipe, *empty) for recipe in recipes]
        >>> differing_settings(runs)
        {'training.epochs': [30, 90]}
    """
    flat = [_flatten(run.recipe.as_data()) for run in runs]
    keys = dict.fromkeys(key for run in flat for key in run)
    settings = {key: [run.get(key) for run in flat] for key in keys}
    settings.pop("about")
    # Compared as text because Python considers 1, 1.0, and True equal.
    return {
        key: values for key, values in settings.items() if len(set(map(json.dumps, values))) > 1
    }


def _read_run(folder: Path, name: str) -> ComparedRun:
    run = RunFolder(folder)
    if not run.config.is_file():
        raise FileNotFoundError(
            f"{folder} is not a run: it has no {run.config.name}; give folders written by "
            "`equilibria train` (`equilibria runs` lists them)"
        )
    try:
        recipe = run.recipe()
    except ValueError as error:
        raise ValueError(f"{folder} is not a run of `equilibria train`: {error}") from None
    kind = None
    with suppress(ValueError):
        kind = dataset_card(recipe.data.name).kind
    return ComparedRun(
        name=name,
        folder=folder,
        recipe=recipe,
        kind=kind,
        parameters=_stored_parameters(run, recipe),
        is_finished=run.is_finished(),
        epochs=tuple(run.read_metrics()),
        evaluation=_stored_evaluation(run),
    )


def _stored_parameters(run: RunFolder, recipe: Recipe) -> int | None:
    """Return the number of trained parameters in the stored weights, which needs no data set."""
    weights = (
        run.weights if run.weights.is_file() else Checkpoints(run.checkpoints).newest_weights()
    )
    if weights is None:
        return None
    check_run_file(weights, run.path)
    check_file_size(weights)
    check_model_size(recipe.model.name, recipe.model.options)
    # Only the names are needed, to distinguish parameters from buffers.
    with torch.device("meta"), errors_at("model.options"):
        model = create_model(recipe.model.name, **recipe.model.options)
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    stored = read_weights(weights)
    return sum(stored[name].numel() for name in names) if names <= set(stored) else None


def _stored_evaluation(run: RunFolder) -> Mapping[str, Any] | None:
    """Return the stored evaluation; None if it is missing, damaged, or older than the weights."""
    file = run.evaluation
    if not (file.is_file() and run.weights.is_file()):
        return None
    if file.stat().st_mtime < run.weights.stat().st_mtime:
        return None
    try:
        evaluation = unsealed(read_run_text(file, run.path).decode(), file)
        if not evaluation:
            raise DamagedFileError(f"{file} is damaged: it contains no values")
        return evaluation
    except ValueError as error:
        warn_caller(str(error), CheckpointWarning)
        return None


def _short_names(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
