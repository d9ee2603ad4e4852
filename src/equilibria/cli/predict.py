"""`equilibria predict`: what a trained model sees in image files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import Best, Device, FinishedRun, JsonList, command, opened
from equilibria.cli.console import print_json, print_table
from equilibria.cli.faults import complain, unanswered, unreadable, writable_folder

LEAST_SHARE = 0.01
"""Of the pixels, for a class to be named in the table."""


@command(
    "predict",
    "equilibria predict runs/opteq digit.png",
    "equilibria predict runs/opteq folder-of-images --json",
    "equilibria predict runs/camvid street.png --output drawn",
)
def predict(
    run: FinishedRun,
    images: Annotated[list[Path], Argument(help="Image files, or folders of them.")],
    output: Annotated[
        Path,
        Option(help="Folder for the pictures, if the run segments images."),
    ] = Path("equilibria-predictions"),
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Classify image files, or their pixels, with a trained model."""
    predictions: Sequence[eq.training.Prediction | eq.report.PixelPrediction]
    problems: list[Exception] = []
    where = eq.training.choose_device(device)
    files = eq.data.find_images(images)
    experiment = opened(run, where, best)
    if not experiment.task.names_classes:
        task = experiment.recipe.task.name
        raise ValueError(f"a run of the task {task!r} has no classes to predict")
    if isinstance(experiment.task, eq.tasks.Segmentation):
        writable_folder(output)
        predictions = list(
            eq.report.predict_pixels(experiment, files, where, output, problems.append)
        )
    else:
        found = eq.predict(experiment.model, files, on_unreadable=problems.append)
        predictions = cast(list[eq.training.Prediction], found)
    if as_json:
        print_json(predictions)
    elif predictions:
        _show(predictions)
    silent = [
        p
        for p in predictions
        if not (p.label if isinstance(p, eq.training.Prediction) else p.classes)
    ]
    complain(unreadable(problems, len(files)), unanswered(len(silent), len(predictions)))


def _show(predictions: Sequence[eq.training.Prediction | eq.report.PixelPrediction]) -> None:
    rows = []
    for p in predictions:
        if isinstance(p, eq.report.PixelPrediction):
            named = (f"{n} {s:.1%}" for n, s in p.classes.items() if s >= LEAST_SHARE)
            said = [p.drawn, ", ".join(named)]
        else:
            said = [p.label or "no answer"]
        solve = ("", "") if p.iterations is None else (str(p.iterations), "yes" * bool(p.converged))
        sure = "" if math.isnan(p.confidence) else f"{p.confidence:.1%}"
        rows.append((p.file, *said, sure, *solve))
    of_pixels = any(isinstance(p, eq.report.PixelPrediction) for p in predictions)
    seen = ("Drawn", "Classes") if of_pixels else ("Class",)
    numbers = ("Confidence", "Iterations", "Converged")
    print_table(("File", *seen, *numbers), rows, right=numbers)
