"""`equilibria predict`: predict classes for image files."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import (
    Best,
    Certified,
    Device,
    JsonList,
    OverwriteFiles,
    SomeRun,
    command,
    opened_model,
)
from equilibria.cli.console import json_list, print_table, progress_bar, say, shown
from equilibria.cli.csv_files import csv_rows
from equilibria.cli.faults import (
    STANDARD_OUTPUT,
    check_table,
    complain,
    note_frames,
    unanswered,
    unreadable,
    writable_folder,
)
from equilibria.cli.file_segmentation import PixelPrediction, segment_files

if TYPE_CHECKING:
    AnyPrediction: TypeAlias = eq.inference.Prediction | PixelPrediction

MIN_SHARE = 0.01
"""Smallest share of the pixels for which the table names a class."""
MAX_ROWS = 200
"""Maximum number of rows in a table of files; with more files a summary is printed."""


@command(
    "predict",
    "equilibria predict runs/opteq digit.png",
    "equilibria predict --model digits-opteq digit.png",
    "equilibria predict runs/opteq folder-of-images --top 3 --csv predictions.csv",
    "equilibria predict runs/opteq folder-of-images --json",
    "equilibria predict runs/opteq folder-of-images --certified",
    "equilibria predict runs/camvid street.png --output drawn",
)
def predict(
    run: SomeRun,
    images: Annotated[list[Path], Argument(help="Image files, or folders of them.")],
    top: Annotated[
        int | None, Option(min=1, help="Number of classes per image, with confidences.")
    ] = None,
    table: Annotated[
        Path | None, Option("--csv", help="CSV file with one line per image; - is standard output.")
    ] = None,
    output: Annotated[
        Path,
        Option(help="Folder for the pictures, if the run segments images."),
    ] = Path("equilibria-predictions"),
    certified: Certified = False,
    overwrite: OverwriteFiles = False,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Classify image files or their pixels; the data set of the run is not needed."""
    check_table(table, as_json=as_json, overwrite=overwrite)
    torch_device = eq.training.processes.choose_device(device)
    files = eq.data.find_images(images)
    opened = opened_model(run, torch_device, best)
    if not opened.task.names_classes:
        task = opened.recipe.task.name
        raise ValueError(
            f"equilibria predict needs a run that predicts classes; its task is {task!r}"
        )
    problems: list[Exception] = []
    predictions: Iterable[AnyPrediction]
    if opened.images.kind == "segmentation":
        if certified:
            raise ValueError("--certified needs a run that classifies whole images, not pixels")
        writable_folder(output)
        predictions = segment_files(
            opened, files, torch_device, output, problems.append, top=top, overwrite=overwrite
        )
        columns = _pixel_columns(opened.images.class_names)
    else:
        predictions = cast(
            "Iterable[AnyPrediction]",
            eq.inference.predictions(
                opened.model,
                files,
                top=top or 1,
                certified=certified,
                on_unreadable=problems.append,
            ),
        )
        columns = _class_columns(min(top or 1, opened.images.num_classes), certified)
    summary = _Summary()
    is_quiet = as_json or table == STANDARD_OUTPUT
    with ExitStack() as stack:
        outputs: list[Callable[[AnyPrediction], object]] = [summary.add]
        if as_json:
            outputs.append(stack.enter_context(json_list()))
        if table is not None:
            outputs.append(stack.enter_context(_csv_lines(table, columns)))
        bar = stack.enter_context(progress_bar(silent=is_quiet))
        for prediction in bar.track(predictions, total=len(files), description="predicting"):
            for output_to in outputs:
                output_to(prediction)
    if not is_quiet:
        summary.show()
        if table is not None:
            say(f"Written: {table}")
    note_frames(files)
    complain(unreadable(problems, len(files)), unanswered(summary.unanswered, summary.count))


@dataclass
class _Summary:
    """The first predictions, and totals per class that are shown instead if there are many."""

    first: list[AnyPrediction] = field(default_factory=list)
    count: int = 0
    unanswered: int = 0
    """Number of images for which the outputs are not finite."""
    classes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 3))
    """Number of images, sum of confidences, and sum of shares of pixels, per class."""

    def add(self, prediction: AnyPrediction) -> None:
        self.count += 1
        if self.count <= MAX_ROWS:
            self.first.append(prediction)
        if isinstance(prediction, eq.inference.Prediction):
            shares = {prediction.label or "": 1.0}
        else:
            shares = prediction.classes
        self.unanswered += not any(shares)
        for name, share in shares.items():
            total = self.classes[name or "no answer"]
            total[0] += 1
            total[1] += 0.0 if math.isnan(prediction.confidence) else prediction.confidence
            total[2] += share

    def show(self) -> None:
        if self.count > MAX_ROWS:
            self._show_classes()
        elif self.first:
            _show(self.first)

    def _show_classes(self) -> None:
        of_pixels = isinstance(self.first[0], PixelPrediction)
        last = "Share of pixels" if of_pixels else "Confidence, mean"
        rows = [
            (
                name,
                f"{images:.0f}",
                f"{(share / self.count if of_pixels else confidence / images):.1%}",
            )
            for name, (images, confidence, share) in sorted(
                self.classes.items(), key=lambda item: -item[1][2]
            )
        ]
        print_table(("Class", "Images", last), rows, right=("Images", last))
        say(f"{self.count} images. Use --csv FILE or --json for predictions per image.")


def _show(predictions: Sequence[AnyPrediction]) -> None:
    rows = []
    for p in predictions:
        if isinstance(p, PixelPrediction):
            named = (f"{n} {s:.1%}" for n, s in p.classes.items() if s >= MIN_SHARE)
            cells = [p.drawn, ", ".join(named)]
        else:
            cells = [p.label or "no answer"]
        solve = (shown(p.iterations), "yes" * bool(p.converged), *_certified_cell(p))
        confidence = "" if math.isnan(p.confidence) else f"{p.confidence:.1%}"
        rows.append((p.file, *cells, confidence, *_other_classes_cell(p), *solve))
    of_pixels = isinstance(predictions[0], PixelPrediction)
    answer = ("Picture", "Classes") if of_pixels else ("Class",)
    others = ("Other classes",) if any(map(_other_classes_cell, predictions)) else ()
    numbers = ("Confidence", "Iterations", "Converged")
    last = ("Certified",) if _certified_cell(predictions[0]) else ()
    print_table(("File", *answer, numbers[0], *others, *numbers[1:], *last), rows, right=numbers)


def _certified_cell(p: AnyPrediction) -> tuple[str, ...]:
    """Return the cell about the certificate; empty without --certified."""
    if isinstance(p, PixelPrediction) or p.certified is None:
        return ()
    return ("yes" if p.certified else "no",)


def _other_classes_cell(p: AnyPrediction) -> tuple[str, ...]:
    """Return the cell of the classes after the first; empty without --top."""
    if isinstance(p, PixelPrediction) or len(p.top) < 2:
        return ()
    return (", ".join(f"{name} {confidence:.1%}" for name, confidence in list(p.top.items())[1:]),)


Columns: TypeAlias = "tuple[list[str], Callable[[Any], list[Any]]]"
"""Headings of a CSV file, and a function that returns the cells of a prediction."""


def _class_columns(top: int, certified: bool) -> Columns:
    names = ["file", "class", "confidence", "iterations", "converged"]
    names += ["certified"] * certified
    more = [f"{name}_{rank}" for rank in range(2, top + 1) for name in ("class", "confidence")]

    def cells(p: eq.inference.Prediction) -> list[Any]:
        others = [cell for pair in list(p.top.items())[1:] for cell in pair]
        confidence = None if math.isnan(p.confidence) else p.confidence
        certificate = [p.certified] * certified
        return [p.file, p.label, confidence, p.iterations, p.converged, *certificate, *others]

    return [*names, *more], cells


def _pixel_columns(class_names: Sequence[str]) -> Columns:
    """Return the columns for segmentation: one per class, with its share of the pixels."""
    names = ["file", "drawn", "confidence", "iterations", "converged"]

    def cells(p: PixelPrediction) -> list[Any]:
        confidence = None if math.isnan(p.confidence) else p.confidence
        shares = [p.classes.get(name, 0.0) for name in class_names]
        return [p.file, p.drawn, confidence, p.iterations, p.converged, *shares]

    return [*names, *class_names], cells


@contextmanager
def _csv_lines(path: Path, columns: Columns) -> Iterator[Callable[[AnyPrediction], object]]:
    """Yield a function that writes a line immediately, so that interruptions lose no lines."""
    headings, cells = columns
    with ExitStack() as stack:
        file = sys.stdout
        if path != STANDARD_OUTPUT:
            file = stack.enter_context(path.open("w", newline="", encoding="utf-8"))
        write = csv_rows(file)
        write(headings)
        yield lambda prediction: write(cells(prediction))
