"""Training runs side by side.

Compares results, cost, and recipes, and draws the curves as a PNG.
"""

from __future__ import annotations

import json
import math
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
from equilibria.report import style
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

PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.7
"""In inches."""
LINE = 0.22
"""The height of a line of the legend, in inches."""
WIDTH, MARK = 2.0, 5.0
"""Of a line and of the mark at its end, in points."""
CPU = "cpu_seconds"

EVALUATION_KEYS = frozenset(
    [
        *("model", "data", "parameters", "samples", "accuracy", "mean_iou", "mean_accuracy"),
        *("top5_accuracy", "loss", "mean_iterations", "max_iterations", "share_converged"),
        "max_residual",
    ]
)
"""What every stored evaluation may hold; all else are measures of the task's own."""


Curve = list[tuple[int, float]]
"""Places in the metrics, and values."""


@dataclass(frozen=True)
class ComparedRun:
    """A run as far as it got. What was not measured, or not yet, is None.

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq")
        >>> epochs = ({"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0})
        >>> from equilibria.report.compare import ComparedRun
        >>> run = ComparedRun("a", Path("runs/a"), recipe, None, 100, True, epochs, None)
        >>> run.last("loss")
        1.0
    """

    name: str
    """The shortest end of the path that no other run has."""
    folder: Path
    recipe: Recipe
    kind: str | None
    """Of the data; None if the data set is not registered here."""
    parameters: int | None
    is_finished: bool
    epochs: tuple[Mapping[str, Any], ...]
    """The metrics, as they are on the disk."""
    evaluation: Mapping[str, Any] | None

    def last(self, key: str) -> float | None:
        """Return a metric of the last epoch."""
        return self.epochs[-1].get(key) if self.epochs else None

    def curve(self, key: str) -> Curve:
        """A number over the epochs that have it."""
        return [
            (place, float(line[key]))
            for place, line in enumerate(self.epochs)
            if line.get(key) is not None
        ]

    @property
    def scores(self) -> Curve:
        """Scores on the validation images."""
        return self.curve("validation_score")

    def total(self, key: str) -> float | None:
        """The sum over all epochs; None if one of them lacks it."""
        values = self.running_total(key)
        return values[-1] if values else None

    def running_total(self, key: str) -> list[float]:
        """The sum up to each epoch; nothing if one of them lacks it. No epoch takes zero time."""
        values = [float(line.get(key) or 0) for line in self.epochs]
        return list(accumulate(values)) if all(values) else []

    def as_data(self) -> dict[str, Any]:
        """The run in plain numbers."""
        best = max(self.scores, key=lambda score: score[1], default=None)
        tested = self.evaluation or {}
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
            "test_accuracy": tested.get("accuracy"),
            "test_mean_iou": tested.get("mean_iou"),
            "test_figures": {
                name: value
                for name, value in tested.items()
                if name not in EVALUATION_KEYS and isinstance(value, float | int)
            },
            "mean_iterations": self.last("mean_iterations"),
            "share_converged": self.last("share_converged"),
            "seconds": self.total("seconds"),
            "cpu_seconds": self.total(CPU),
        }


def score_name(runs: Sequence[ComparedRun]) -> str:
    """What the validation scores of these runs are.

    Examples:
        >>> from pathlib import Path
        >>> recipe, empty = eq.training.load_recipe("digits-opteq"), (None, None, False, (), None)
        >>> from equilibria.report.compare import ComparedRun, score_name
        >>> score_name([ComparedRun("a", Path("a"), recipe, *empty)])
        'accuracy'
    """
    if any(run.recipe.task.name is not None for run in runs):
        return "score"
    return "mIoU" if any(run.kind == "segmentation" for run in runs) else "accuracy"


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """The runs in these folders; what cannot be compared is an error that says why.

    Examples:
        >>> from pathlib import Path
        >>> few = ["data.options.train_samples=64", "training.epochs=1"]
        >>> model = eq.train("digits-opteq", *few, output="runs/read")
        >>> from equilibria.report.compare import read_runs
        >>> (run,) = read_runs([Path("runs/read")])
        >>> run.name, run.is_finished
        ('read', True)
    """
    if not folders:
        raise ValueError("there is nothing to compare: name the folders of runs")
    places = [folder.resolve() for folder in folders]
    for place, folder in zip(places, folders, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"the run {folder} is named twice: name every run once")
    runs = list(map(_read_run, folders, _short_names(places)))
    kinds = {run.kind: run for run in runs if run.kind is not None}
    if len(kinds) > 1:
        examples = ", ".join(f"{run.folder} ({kind})" for kind, run in kinds.items())
        raise ValueError(f"these runs learn different things: {examples}; compare those of a kind")
    return runs


def store_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Keep the evaluation of a run in its folder; numbers that are not finite become None.

    Examples:
        >>> from pathlib import Path
        >>> Path("evaluated").mkdir()
        >>> from equilibria.report.compare import store_evaluation
        >>> store_evaluation(Path("evaluated"), {"accuracy": 0.98})
        >>> [path.name for path in Path("evaluated").iterdir()]
        ['evaluation.json']
    """
    write_atomically(RunFolder(folder).evaluation, f"{sealed_json(evaluation)}\n".encode())


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """The keys on which the recipes disagree, each with a value a run; None where it has none.

    Examples:
        >>> from pathlib import Path
        >>> longer = eq.training.load_recipe("digits-opteq", ["training.epochs=90"])
        >>> recipes = [eq.training.load_recipe("digits-opteq"), longer]
        >>> empty = (None, None, False, (), None)
        >>> from equilibria.report.compare import ComparedRun, differing_settings
        >>> runs = [ComparedRun("a", Path("a"), recipe, *empty) for recipe in recipes]
        >>> differing_settings(runs)
        {'training.epochs': [30, 90]}
    """
    flat = [_flatten(run.recipe.as_data()) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    values = {key: [settings.get(key) for settings in flat] for key in keys}
    values.pop("about")
    # Compared as text: 1 and true, and 1 and 1.0, are equal to Python.
    return {key: found for key, found in values.items() if len(set(map(json.dumps, found))) > 1}


@style.drawing()
def comparison_png(runs: Sequence[ComparedRun]) -> bytes:
    """Loss, accuracy, validation score and iterations; over the epochs, and over processor time.

    A panel is there if a run has what it shows. Runs that did not record their processor time are
    left out of the second row.

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq")
        >>> epochs = ({"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0})
        >>> from equilibria.report.compare import ComparedRun, comparison_png
        >>> run = ComparedRun("a", Path("runs/a"), recipe, None, 100, True, epochs, None)
        >>> comparison_png([run])[1:4]
        b'PNG'
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    every = {
        "Training loss": [run.curve("loss") for run in runs],
        "Training accuracy": [run.curve("accuracy") for run in runs],
        f"Validation {score_name(runs)}": [run.scores for run in runs],
        "Iterations, mean": [run.curve("mean_iterations") for run in runs],
    }
    curves = {title: lines for title, lines in every.items() if any(lines)}
    if not curves:
        raise ValueError("no run has finished an epoch: there is nothing to draw yet")
    timed = [bool(run.running_total(CPU)) for run in runs]
    rows = 2 if any(timed) else 1
    width = PANEL_WIDTH * len(curves)
    names = [
        style.shortened(run.name, int(0.6 * width / style.LETTER))
        + ("" if is_timed or rows == 1 else " (CPU time not recorded)")
        for run, is_timed in zip(runs, timed, strict=True)
    ]
    columns = style.legend_columns(names, width)
    legend_height = LINE * math.ceil(len(runs) / columns) + 0.1
    figure = Figure(
        figsize=(width, PANEL_HEIGHT * rows + legend_height),
        facecolor=style.PAPER,
        layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08),
    )
    panels = figure.subplots(rows, len(curves), squeeze=False, sharey="col")
    for column, (title, lines) in enumerate(curves.items()):
        for row, axis in enumerate(panels[:, column]):
            _draw(axis, title, lines, runs, over_time=row == 1)
    marks = [
        Line2D([], [], label=name, linewidth=WIDTH, markersize=MARK, **style.series(at))
        for at, name in enumerate(names)
    ]
    style.legend_below(figure, marks, columns)
    return style.figure_png(figure)


def _read_run(folder: Path, name: str) -> ComparedRun:
    run = RunFolder(folder)
    if not run.config.is_file():
        raise FileNotFoundError(
            f"{folder} is not a run: it has no {run.config.name}; name folders that `equilibria "
            "train` wrote (`equilibria runs` lists them)"
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
    """How many numbers were trained, counted in the stored weights: the data may be elsewhere."""
    weights = (
        run.weights if run.weights.is_file() else Checkpoints(run.checkpoints).newest_weights()
    )
    if weights is None:
        return None
    check_run_file(weights, run.path)
    check_file_size(weights)
    check_model_size(recipe.model.name, recipe.model.options)
    # On this device nothing is computed. The names are needed alone, to tell buffers apart.
    with torch.device("meta"), errors_at("model.options"):
        model = create_model(recipe.model.name, **recipe.model.options)
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    stored = read_weights(weights)
    return sum(stored[name].numel() for name in names) if names <= set(stored) else None


def _stored_evaluation(run: RunFolder) -> Mapping[str, Any] | None:
    """None if there is none to be read, or if it is older than the weights, so not of them."""
    file = run.evaluation
    if not (file.is_file() and run.weights.is_file()):
        return None
    if file.stat().st_mtime < run.weights.stat().st_mtime:
        return None
    try:
        found = unsealed(read_run_text(file, run.path).decode(), file)
        if not found:
            raise DamagedFileError(f"{file} is damaged: it holds nothing")
        return found
    except ValueError as error:
        warn_caller(str(error), CheckpointWarning)
        return None


def _short_names(places: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = [str(Path(*place.parts[-depth:])) for place in places]
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


def _draw(
    axis: Any, title: str, lines: list[Curve], runs: Sequence[ComparedRun], *, over_time: bool
) -> None:
    from matplotlib.ticker import PercentFormatter

    longest = max((run.total(CPU) or 0.0 for run in runs), default=0.0)
    unit, unit_name = style.time_unit(longest)
    for place, (run, line) in enumerate(zip(runs, lines, strict=True)):
        times = [seconds / unit for seconds in run.running_total(CPU)]
        if over_time and not times:
            continue
        along = [times[at] if over_time else run.epochs[at]["epoch"] for at, _ in line]
        look = style.series(place)
        mark = look.pop("marker")
        axis.plot(along, [value for _, value in line], linewidth=WIDTH, **look)
        # The mark says where a run is, and shows one of a single epoch.
        if line:
            axis.plot(along[-1], line[-1][1], marker=mark, markersize=MARK, color=look["color"])
    if over_time:
        axis.set_xlabel(f"processor time ({unit_name})")
        axis.set_xlim(left=0)
    else:
        axis.set_title(title)
        style.count_along(axis, "epoch")
    values = [value for line in lines for _, value in line]
    if "accuracy" in title or "mIoU" in title or ("score" in title and max(values) <= 1):
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    elif "Iterations" in title:
        axis.set_ylim(0, 1.15 * max(values) or 1)
    elif max(values) > style.LEAST_FACTOR * min(values) > 0:
        style.plain_log_axis(axis)
    style.dress_axes(axis)
