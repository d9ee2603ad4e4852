"""What a trained model sees in the pixels of image files, drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch.nn import functional as F

from equilibria.data import image_to_tensor, open_image
from equilibria.equilibrium import solving
from equilibria.report.segmentation import class_shares, prediction_png
from equilibria.training import Experiment, write_atomically

LONGEST_SIDE = 1024
"""Of a drawn segmentation, in pixels; larger images are drawn smaller."""


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


@torch.no_grad()
def predict_pixels(
    experiment: Experiment, files: Sequence[Path], device: torch.device, output: Path
) -> Iterator[PixelPrediction]:
    """Segment images framed as those of training; draw what is in the frame as large as it was."""
    names = experiment.data.class_names
    is_gray = experiment.data.channels == 1
    output.mkdir(parents=True, exist_ok=True)
    for path, (drawn,) in zip(files, drawn_files(files, output, "classes"), strict=True):
        inputs = experiment.data.read_image(path)[None].to(device)
        image = experiment.data.frame.region(open_image(path, is_gray=is_gray))
        scale = min(1.0, LONGEST_SIDE / max(image.size))
        height, width = (max(1, round(side * scale)) for side in (image.height, image.width))
        with solving(experiment.model, record=True) as record:
            probabilities = experiment.model(inputs).float().softmax(dim=1).cpu()
        confidence, classes = F.interpolate(
            probabilities, (height, width), mode="bilinear", align_corners=False
        )[0].max(dim=0)
        pixels = image_to_tensor(image.resize((width, height))).float() / 255
        write_atomically(drawn, prediction_png(pixels, classes, names))
        solution = record.solutions[-1] if record.solutions else None
        yield PixelPrediction(
            file=str(path),
            drawn=str(drawn),
            classes={names[i]: share for i, share in class_shares(classes, len(names))},
            confidence=float(confidence.mean()),
            iterations=None if solution is None else int(solution.iterations[0]),
            converged=None if solution is None else bool(solution.converged[0]),
        )


def drawn_files(files: Sequence[Path], folder: Path, *kinds: str) -> list[tuple[Path, ...]]:
    """Where the pictures of each file go, one a kind; no file is written over.

    A picture has the name of its image; a number tells those of the same name apart.
    """
    taken = {file.resolve() for file in files}
    found = []
    for file in files:
        for number in count(1):
            stem = file.stem if number == 1 else f"{file.stem}-{number}"
            paths = tuple(folder / f"{stem}-{kind}.png" for kind in kinds)
            places = {path.resolve() for path in paths}
            if not taken & places:
                break
        taken |= places
        found.append(paths)
    return found
