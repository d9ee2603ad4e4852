"""Image files damaged, or damaged already, and restored by a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.cli.predict import BATCH
from equilibria.data import Framing, read_image
from equilibria.inputs import (
    Corrupted,
    Corruption,
    Inpainting,
    SuperResolution,
    answer,
    entries,
    generator_of,
    get_corruption,
    is_generator,
    misfit,
    picture_of,
    restore,
)
from equilibria.operators import Mask
from equilibria.report.figures import image_grid_png
from equilibria.solvers import Status
from equilibria.tasks.image_quality import picture_psnr
from equilibria.tasks.reconstruction import Reconstruction
from equilibria.tasks.restoration import ImageRestoration
from equilibria.training import Experiment, write_atomically

LEAST_SIDE = 160
"""Pixels of a side of an image in a sheet, about."""


@dataclass(frozen=True, kw_only=True)
class RestorationRequest:
    """What the command line asks for; None is what was left out.

    test: restore this many of the run's own test images instead of files.
    damaged: the images are measurements already; there is no original to compare with.
    mask: an image whose bright pixels are hidden, for inpainting.
    search: options of `restore`: iterations, ridge, starts, engine, …
    """

    folder: Path
    images: list[Path]
    task: str | None
    output: Path
    test: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    stop_at_noise: bool = False
    damaged: bool = False
    mask: Path | None = None
    seed: int = 0
    best: bool = False
    device_name: str = "auto"
    as_json: bool = False


@dataclass(frozen=True)
class RestoredImage:
    """One image."""

    file: str
    restored: str
    """The restored image, in the size of the model's images."""
    sheet: str
    """Side by side: the original, if there is one, what was measured, what the model made of it,
    and, where it differs, the restored image."""
    measured_psnr: float | None
    restored_psnr: float | None
    """None where there is no original."""
    misfit: float
    """The root of the mean squared difference between what was measured of an entry and what the
    restored image would have given."""
    status: str
    residual: float | None
    """None for a model without an equilibrium, as are the iterations."""
    iterations: int | None
    message: str


@dataclass(frozen=True)
class Answer:
    """What the model makes of a batch of measurements."""

    images: Tensor
    status: Sequence[str]
    residual: Sequence[float | None]
    iterations: Sequence[int | None]
    messages: Sequence[str]


@dataclass(frozen=True)
class RestoredBatch:
    """A batch of measurements, restored."""

    answer: Answer
    images: Tensor
    """The model's, with what was seen put back where it was seen without noise."""
    picture: Tensor | None
    """What was measured, as far as that is a picture."""


def chosen_damage(request: RestorationRequest, experiment: Experiment) -> Corruption:
    """What is undone: as asked for, or what the run was trained to undo."""
    task = experiment.task
    own = task.damage if isinstance(task, ImageRestoration) else None
    if request.task is None:
        if own is None:
            raise ValueError("name what is to be undone: --task inpaint, denoise, deblur, superres")
        if request.options:
            raise ValueError(f"{', '.join(request.options)} needs --task as well")
        return own
    chosen = get_corruption(request.task, **request.options)
    if own is not None and type(own) is not type(chosen) and not is_generator(experiment.model):
        raise ValueError(
            f"the run was trained to undo {own}, not {chosen}: only a generator can do what it was "
            "not trained for"
        )
    return chosen


@torch.no_grad()
def restored_files(
    request: RestorationRequest,
    experiment: Experiment,
    damage: Corruption,
    files: list[Path],
    device: torch.device,
) -> Iterator[RestoredImage]:
    """Restore the images in files, in batches, and draw them."""
    chance = torch.Generator().manual_seed(request.seed)
    request.output.mkdir(parents=True, exist_ok=True)
    names = drawn_names(files, request.output)
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        originals, seen = _measure(request, experiment, damage, some, chance, device)
        batch = restored_batch(request, experiment, seen)
        found, images, picture = batch.answer, batch.images, batch.picture
        count = entries(seen.measured, seen.measurement)
        left = (misfit(found.images, seen.measured, seen.measurement) / count).sqrt()
        for row, file in enumerate(some):
            restored, sheet = names[start + row]
            columns = [originals[row]] if originals is not None else []
            if picture is not None:
                columns.append(picture[row])
            if images is not found.images:
                columns.append(found.images[row])
            columns.append(images[row])
            write_atomically(restored, image_grid_png([images[row : row + 1]], scale=1))
            write_atomically(
                sheet, image_grid_png([torch.stack(columns)], scale=_magnification(images))
            )
            yield RestoredImage(
                file=str(file),
                restored=str(restored),
                sheet=str(sheet),
                measured_psnr=_psnr(picture, originals, row),
                restored_psnr=_psnr(images, originals, row),
                misfit=float(left[row]),
                status=found.status[row],
                residual=found.residual[row],
                iterations=found.iterations[row],
                message=found.messages[row],
            )


def restored_batch(
    request: RestorationRequest, experiment: Experiment, seen: Corrupted
) -> RestoredBatch:
    """Restore what was seen of a batch of images."""
    found = _restore(request, experiment, seen)
    images = found.images
    if isinstance(seen.measurement, Mask) and not seen.noise:
        images = seen.measurement.fill(seen.measured, images)
    picture = picture_of(seen.measurement, seen.measured, images.shape[2:])
    return RestoredBatch(found, images, picture)


def drawn_names(files: list[Path], output: Path) -> list[tuple[Path, Path]]:
    """Where the restored image of each file goes, and its sheet; no file is written over."""
    taken = {file.resolve() for file in files}
    found = []
    for file in files:
        for count in range(1, 2 * len(files) + 2):
            stem = f"{file.stem}{f'-{count}' if count > 1 else ''}"
            pair = (output / f"{stem}-restored.png", output / f"{stem}-sheet.png")
            if not taken & {path.resolve() for path in pair}:
                break
        taken |= {path.resolve() for path in pair}
        found.append(pair)
    return found


def _measure(
    request: RestorationRequest,
    experiment: Experiment,
    damage: Corruption,
    files: list[Path],
    chance: torch.Generator,
    device: torch.device,
) -> tuple[Tensor | None, Corrupted]:
    """The original images, if these are they, and what is seen of them."""
    channels, height, width = experiment.data.image_shape
    if request.mask is not None and not isinstance(damage, Inpainting):
        raise ValueError("--mask says which pixels are missing: it is for --task inpaint")
    if request.damaged and isinstance(damage, SuperResolution):
        height, width = height // damage.factor, width // damage.factor
    frame = Framing((height, width))
    images = [read_image(path, frame, is_gray=channels == 1) for path in files]
    batch = torch.stack(images).to(device).float() / 255
    if request.mask is not None:
        bright = read_image(request.mask, frame, is_gray=True).to(device)
        mask = Mask((bright < 128).to(batch)[None])
        if not bool(mask.known.any()) or bool(mask.known.all()):
            raise ValueError(
                f"{request.mask} hides every pixel, or none: what is missing is bright in a mask"
            )
        seen = Corrupted(mask(batch), mask, 0.0)
    elif request.damaged and isinstance(damage, Inpainting):
        raise ValueError("which pixels of a damaged image are missing? Give --mask an image")
    else:
        seen = damage.corrupt(batch, chance)
    if not request.damaged:
        return batch, seen
    measured = seen.measurement(batch) if request.mask is not None else batch
    return None, Corrupted(measured, seen.measurement, seen.noise)


def _restore(request: RestorationRequest, experiment: Experiment, seen: Corrupted) -> Answer:
    model, task = experiment.model, experiment.task
    if isinstance(task, ImageRestoration) and not is_generator(model):
        return _answered(model, seen, request)
    own: dict[str, Any] = {}
    if isinstance(task, ImageRestoration):
        own = vars(task.search(task.evaluation_iterations))
    elif isinstance(task, Reconstruction):
        own = {"ridge": task.ridge}
    if request.stop_at_noise:
        own = {**own, "ridge": 0.0, "noise": seen.noise}
    search = {**own, **request.search}
    found = restore(
        generator_of(model), seen.measured, seen.measurement, seed=request.seed, **search
    )
    names = [Status(int(s)).name.lower().replace("_", " ") for s in found.status]
    return Answer(
        images=found.images,
        status=names,
        residual=[float(value) for value in found.residual],
        iterations=[int(value) for value in found.iterations],
        messages=list(found.messages),
    )


def _answered(model: nn.Module, seen: Corrupted, request: RestorationRequest) -> Answer:
    """By a model that restores without a search."""
    if request.search or request.stop_at_noise:
        raise ValueError(
            f"{type(model).__name__} restores without a search: leave out "
            f"{', '.join([*request.search, *['stop_at_noise'] * request.stop_at_noise])}"
        )
    images = answer(model, seen)
    solution = getattr(model, "last_solution", None)
    if solution is None:
        nothing = [None] * len(images)
        return Answer(images, [""] * len(images), nothing, nothing, [""] * len(images))
    return Answer(
        images=images,
        status=[Status(int(s)).name.lower().replace("_", " ") for s in solution.status],
        residual=[float(value) for value in solution.residual],
        iterations=[int(value) for value in solution.iterations],
        messages=[solution.message(row) for row in range(len(images))],
    )


def _magnification(images: Tensor) -> int:
    """How many times larger small images are drawn."""
    return max(1, LEAST_SIDE // min(images.shape[2:]))


def _psnr(images: Tensor | None, originals: Tensor | None, row: int) -> float | None:
    if images is None or originals is None:
        return None
    return float(picture_psnr(images[row : row + 1], originals[row : row + 1]))
