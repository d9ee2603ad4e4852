"""`equilibria predict`: what a trained model sees in image files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from equilibria.cli.console import fail
from equilibria.data import image_to_tensor, open_image
from equilibria.tasks import Segmentation
from equilibria.training import Experiment, choose_device, trained, write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
PREDICTING = (None, "classification", "segmentation", "adversarial")
"""The tasks whose models say classes."""
BATCH = 64
LONGEST_SIDE = 1024
"""Of a drawn segmentation, in pixels; larger images are drawn smaller."""
LEAST_SHARE = 0.01
"""Of the pixels, for a class to be named in the table."""

WIDTH_OF_A_FILE = 160
"""Columns where the output is not a terminal."""


@dataclass(frozen=True)
class Prediction:
    """One image."""

    file: str
    label: str
    confidence: float
    iterations: int | None
    """None for a model without an equilibrium, as is `converged`."""
    converged: bool | None


@dataclass(frozen=True)
class PixelPrediction:
    """One image, class by class."""

    file: str
    drawn: str
    """The picture of it."""
    classes: dict[str, float]
    """Those that were found, with their share of the pixels, the largest first."""
    confidence: float
    """The mean over the pixels."""
    iterations: int | None
    """None for a model without an equilibrium, as is `converged`."""
    converged: bool | None


def run_prediction(
    *,
    folder: Path,
    images: list[Path],
    output: Path,
    best: bool,
    device_name: str,
    as_json: bool,
) -> None:
    """Classify image files, or all images in folders; or their pixels, drawn into `output`."""
    predictions: list[Prediction] | list[PixelPrediction]
    try:
        device = choose_device(device_name)
        files = find_images(images)
        experiment = trained(folder, device=device, weights="best" if best else "last")
        if experiment.recipe.task.name not in PREDICTING:
            raise ValueError(
                f"a run of the task {experiment.recipe.task.name!r} has no classes to predict"
            )
        if isinstance(experiment.task, Segmentation):
            predictions = list(predict_pixels(experiment, files, device, output))
        else:
            predictions = list(predict(experiment, files, device))
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps([asdict(p) for p in predictions], indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_FILE)
    console.print(_table(predictions))


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Image files, those of folders included, in order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            if not inside:
                raise ValueError(f"there is no image in the folder {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"there is no file or folder {path}")
    return found


@torch.no_grad()
def predict(
    experiment: Experiment, files: list[Path], device: torch.device
) -> Iterator[Prediction]:
    names = experiment.data.class_names
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        batch = torch.stack([experiment.data.read_image(path) for path in some]).to(device)
        probabilities = experiment.model(batch).softmax(dim=1).cpu()
        for i, path in enumerate(some):
            confidence, label = probabilities[i].max(dim=0)
            iterations, converged = _solve(experiment, i)
            yield Prediction(
                file=str(path),
                label=names[int(label)],
                confidence=float(confidence),
                iterations=iterations,
                converged=converged,
            )


@torch.no_grad()
def predict_pixels(
    experiment: Experiment, files: list[Path], device: torch.device, output: Path
) -> Iterator[PixelPrediction]:
    """Segment images framed as those of training; draw what is in the frame as large as it was."""
    from equilibria.report.segmentation import class_shares, prediction_png

    names = experiment.data.class_names
    is_gray = experiment.data.channels == 1
    output.mkdir(parents=True, exist_ok=True)
    for path, drawn in zip(files, drawn_files(files, output), strict=True):
        inputs = experiment.data.read_image(path)[None].to(device)
        image = experiment.data.frame.region(open_image(path, is_gray=is_gray))
        probabilities = experiment.model(inputs).float().softmax(dim=1).cpu()
        size = drawn_size(image)
        confidence, classes = F.interpolate(
            probabilities, size, mode="bilinear", align_corners=False
        )[0].max(dim=0)
        write_atomically(drawn, prediction_png(pixels(image, size), classes, names))
        iterations, converged = _solve(experiment, 0)
        yield PixelPrediction(
            file=str(path),
            drawn=str(drawn),
            classes={names[i]: share for i, share in class_shares(classes, len(names))},
            confidence=float(confidence.mean()),
            iterations=iterations,
            converged=converged,
        )


def drawn_files(files: list[Path], output: Path) -> list[Path]:
    """A picture's name is that of its image; a number tells those of the same name apart."""
    taken = {file.resolve() for file in files}
    found: list[Path] = []
    for file in files:
        candidates = (
            output / f"{file.stem}-classes{f'-{count}' if count > 1 else ''}.png"
            for count in range(1, len(taken) + 2)
        )
        free = next(path for path in candidates if path.resolve() not in taken)
        taken.add(free.resolve())
        found.append(free)
    return found


def drawn_size(image: Image) -> tuple[int, int]:
    """Height and width of the drawn image: its own, unless that is very large."""
    scale = min(1.0, LONGEST_SIDE / max(image.size))
    return max(1, round(image.height * scale)), max(1, round(image.width * scale))


def pixels(image: Image, size: tuple[int, int]) -> Tensor:
    """An image as `(channels, height, width)` of this height and width, with values in [0, 1]."""
    return image_to_tensor(image.resize(size[::-1])).float() / 255


def _solve(experiment: Experiment, sample: int) -> tuple[int | None, bool | None]:
    """How many iterations a sample of the last batch took, and whether it converged."""
    solution = getattr(experiment.model, "last_solution", None)
    if solution is None:
        return None, None
    return int(solution.iterations[sample]), bool(solution.converged[sample])


def _table(predictions: list[Prediction] | list[PixelPrediction]) -> Table:
    table = Table(box=box.SIMPLE)
    of_pixels = any(isinstance(p, PixelPrediction) for p in predictions)
    for column in ("File", *(("Drawn", "Classes") if of_pixels else ("Class",))):
        table.add_column(column, overflow="fold")
    for column in ("Confidence", "Iterations", "Converged"):
        table.add_column(column, justify="right", overflow="fold")
    for p in predictions:
        if isinstance(p, PixelPrediction):
            named = (f"{n} {s:.1%}" for n, s in p.classes.items() if s >= LEAST_SHARE)
            seen = [p.drawn, ", ".join(named)]
        else:
            seen = [p.label]
        solve = ("", "") if p.iterations is None else (str(p.iterations), "yes" * bool(p.converged))
        table.add_row(*map(escape, (p.file, *seen)), f"{p.confidence:.1%}", *solve)
    return table
