"""The images that a command is asked about: files, or test images of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equilibria.cli.app import opened, opened_model
from equilibria.cli.attacking import classifier
from equilibria.cli.faults import complain, unreadable
from equilibria.data import BRIGHTEST, find_images, read_image, readable
from equilibria.training import RecipeModel


@dataclass(frozen=True)
class AskedImages:
    """Images of a classifier, as it takes them."""

    run: RecipeModel
    images: Tensor
    names: Sequence[str]
    """Their files, or their numbers among the test images that are looked at."""
    truths: Sequence[int | None]
    """What they show, where that is known."""
    paths: Sequence[Path]
    problems: Sequence[Exception]
    """Of files that could not be read."""

    @property
    def unreadable(self) -> str:
        return unreadable(self.problems, len(self.paths))


def asked_images(
    run: Path,
    files: Sequence[Path],
    *,
    samples: int,
    device: torch.device,
    best: bool,
    root: Path | None,
) -> AskedImages:
    """Those of the files, framed as in training; without any, test images, evenly spread."""
    if not files:
        experiment = classifier(opened(run, device, best, root))
        images, labels = experiment.some_test_images(samples)
        names = [str(place) for place in range(len(images))]
        return AskedImages(experiment, images.to(device), names, labels.tolist(), [], [])
    asked = classifier(opened_model(run, device, best))
    frame, is_gray = asked.images.frame, asked.images.image_shape[0] == 1

    def read(path: Path) -> Tensor:
        return read_image(path, frame, is_gray=is_gray).float() / BRIGHTEST

    problems: list[Exception] = []
    paths = find_images(files)
    found = list(readable(paths, read, problems.append))
    if not found:
        complain(unreadable(problems, len(paths)))
    images = torch.stack([pixels for _, pixels in found]).to(device)
    names = [str(path) for path, _ in found]
    return AskedImages(asked, images, names, [None] * len(names), paths, problems)
