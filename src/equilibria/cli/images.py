"""Images for commands on classifiers: image files, or test images of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import equilibria as eq
from equilibria.cli.app import opened, opened_model
from equilibria.cli.faults import complain, unreadable

if TYPE_CHECKING:
    import torch

AnyRun = TypeVar("AnyRun", bound="eq.training.experiment.RecipeModel")


@dataclass(frozen=True)
class SelectedImages:
    """Images to classify, in the size and colors of the model's input, and the classifier's run."""

    run: eq.training.experiment.RecipeModel
    images: torch.Tensor
    names: Sequence[str]
    """Per image: its file, or its number among the selected test images."""
    truths: Sequence[int | None]
    """Per image: its true class, or None for an image file."""
    paths: Sequence[Path]
    """Image files; empty for test images."""
    problems: Sequence[Exception]
    """One error per file that could not be read."""

    @property
    def unreadable(self) -> str:
        """Description of the files that could not be read; empty if there are none."""
        return unreadable(self.problems, len(self.paths))


def classifier(run: AnyRun) -> AnyRun:
    """Return the run if it classifies images.

    Raises:
        ValueError: If it does not.
    """
    if run.images.kind != "classification" or not run.task.names_classes:
        raise ValueError(
            f"this command needs a run that classifies images, and {run.recipe.model.name} on "
            f"{run.recipe.data.name} does not"
        )
    return run


def select_images(
    run: Path,
    files: Sequence[Path],
    *,
    samples: int,
    device: torch.device,
    best: bool,
    root: Path | None,
) -> SelectedImages:
    """Open the run of a classifier and load images for it.

    Args:
        run: Folder of the run, or name of a pretrained model.
        files: Image files and folders of them; images are resized and cropped as in training. If
            empty, test images of the run are loaded, evenly spread over the test set.
        samples: Number of test images.
        device: Device of the model and of the images.
        best: Whether to load the weights of the epoch with the best validation score.
        root: Folder of data sets, for test images.

    Raises:
        FaultError: If none of the files can be read.
        ValueError: If the run does not classify images.
    """
    import torch

    if not files:
        experiment = classifier(opened(run, device, best, root))
        images, labels = experiment.some_test_images(samples)
        names = [str(index) for index in range(len(images))]
        return SelectedImages(experiment, images.to(device), names, labels.tolist(), [], [])
    model = classifier(opened_model(run, device, best))
    read = partial(eq.data.read_pixels, framing=model.images.frame, is_gray=model.images.is_gray)
    problems: list[Exception] = []
    paths = eq.data.find_images(files)
    loaded = list(eq.data.image_files.readable(paths, read, problems.append))
    if not loaded:
        complain(unreadable(problems, len(paths)))
    images = torch.stack([pixels for _, pixels in loaded]).to(device)
    names = [str(path) for path, _ in loaded]
    return SelectedImages(model, images, names, [None] * len(names), paths, problems)
