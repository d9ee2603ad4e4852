"""`equilibria predict`: what a trained model sees in image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.markup import escape
from rich.table import Table

from equilibria.cli.app import Best, Device, FinishedRun, JsonList, command
from equilibria.cli.console import one_line_errors, output_console, print_json, table_of
from equilibria.data import find_images
from equilibria.report.segmentation import PixelPrediction, predict_pixels
from equilibria.tasks import Segmentation
from equilibria.training import Prediction, choose_device, trained
from equilibria.training import predict as predict_classes

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
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the pictures, if the run segments images.")
    ] = Path("equilibria-predictions"),
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Classify image files, or their pixels, with a trained model."""
    predictions: Sequence[Prediction | PixelPrediction]
    with one_line_errors():
        where = choose_device(device)
        files = find_images(images)
        experiment = trained(run, device=where, weights="best" if best else "last")
        if not experiment.task.names_classes:
            task = experiment.recipe.task.name
            raise ValueError(f"a run of the task {task!r} has no classes to predict")
        if isinstance(experiment.task, Segmentation):
            predictions = list(predict_pixels(experiment, files, where, output))
        else:
            predictions = cast(list[Prediction], predict_classes(experiment.model, files))
    if as_json:
        print_json(predictions)
    else:
        output_console().print(_table(predictions))


def _table(predictions: Sequence[Prediction | PixelPrediction]) -> Table:
    of_pixels = any(isinstance(p, PixelPrediction) for p in predictions)
    seen = ("Drawn", "Classes") if of_pixels else ("Class",)
    table = table_of(("File", *seen), ("Confidence", "Iterations", "Converged"))
    for p in predictions:
        if isinstance(p, PixelPrediction):
            named = (f"{n} {s:.1%}" for n, s in p.classes.items() if s >= LEAST_SHARE)
            said = [p.drawn, ", ".join(named)]
        else:
            said = [p.label]
        solve = ("", "") if p.iterations is None else (str(p.iterations), "yes" * bool(p.converged))
        table.add_row(*map(escape, (p.file, *said)), f"{p.confidence:.1%}", *solve)
    return table
