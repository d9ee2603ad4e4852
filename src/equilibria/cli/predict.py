"""`equilibria predict`: what a trained model sees in image files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from equilibria.cli.console import fail
from equilibria.training import Experiment, choose_device, trained

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """One image."""

    file: str
    label: str
    confidence: float
    iterations: int | None
    """None for a model without an equilibrium, as is `converged`."""
    converged: bool | None


def run_prediction(*, folder: Path, images: list[Path], device_name: str, as_json: bool) -> None:
    """Classify image files, or all images in folders."""
    try:
        device = choose_device(device_name)
        files = find_images(images)
        experiment = trained(folder, device=device)
        predictions = list(predict(experiment, files, device))
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps([asdict(p) for p in predictions], indent=2, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE)
    for column in ("File", "Class", "Confidence", "Iterations", "Converged"):
        left = column in ("File", "Class")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for p in predictions:
        solve = ("", "") if p.iterations is None else (str(p.iterations), "yes" * bool(p.converged))
        table.add_row(p.file, p.label, f"{p.confidence:.1%}", *solve)
    Console(highlight=False).print(table)


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
) -> Iterable[Prediction]:
    names = experiment.data.class_names
    shape = experiment.data.image_shape
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        batch = torch.stack([read_image(path, shape) for path in some]).to(device)
        probabilities = experiment.model(experiment.prepare(batch)).softmax(dim=1).cpu()
        solution = getattr(experiment.model, "last_solution", None)
        for i, path in enumerate(some):
            confidence, label = probabilities[i].max(dim=0)
            yield Prediction(
                file=str(path),
                label=names[int(label)],
                confidence=float(confidence),
                iterations=None if solution is None else int(solution.iterations[i]),
                converged=None if solution is None else bool(solution.converged[i]),
            )


def read_image(path: Path, shape: tuple[int, ...]) -> Tensor:
    """An image file with pixels in [0, 1], in the size and the channels of a model's images."""
    from PIL import Image, UnidentifiedImageError

    channels, height, width = shape
    try:
        with Image.open(path) as image:
            fitted = image.convert("L" if channels == 1 else "RGB").resize((width, height))
            values = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not an image that can be read") from None
    return values.view(height, width, channels).permute(2, 0, 1).float() / 255
