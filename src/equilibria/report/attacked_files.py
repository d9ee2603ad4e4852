"""Attacks on image files: what a classifier says of them before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equilibria.data import read_pixels
from equilibria.data.image_files import BRIGHTEST, readable
from equilibria.inputs import AttackSettings, attack
from equilibria.models.base import predicted_classes
from equilibria.report.figures import drawn_files
from equilibria.report.sheets import image_png
from equilibria.solvers import Status
from equilibria.training.experiment import RecipeModel
from equilibria.training.files import write_atomically


@dataclass(frozen=True)
class AttackedFile:
    """One image file under one attack."""

    file: str
    method: str
    label: str
    """The class that the attack moves the image away from."""
    before: str
    after: str | None
    """What the model says of the attacked image; None where it has no answer."""
    changed: bool
    """Whether that is another class than before."""
    distance: float
    """Between the two, in the attack's norm."""
    steps: int
    evaluations: int
    """Of the map of the equilibrium, or of the model if it has none, in the whole search."""
    status: str
    """How JIIO ended; empty for other methods."""
    attacked: str | None
    """The file of the attacked image, if it was written."""
    after_in_file: str | None
    """What the model says of that file, whose pixels are whole numbers of 8 bits."""


def attack_files(
    run: RecipeModel,
    files: Sequence[Path],
    attacks: Sequence[AttackSettings],
    device: torch.device,
    *,
    label: str | None = None,
    output: Path | None = None,
    overwrite: bool = False,
    on_unreadable: Callable[[Exception], None] | None = None,
    on_refused: Callable[[AttackSettings, Exception], None] | None = None,
) -> Iterator[AttackedFile]:
    """Attack images, framed as those of training, one by one, by one method after the other.

    label: the class that all of them show; by default what the model says of each.
    output: a folder for the attacked images; `overwrite` replaces those that are there.
    on_unreadable: is told of a file that cannot be read, which is then left out.
    on_refused: is told of an attack that does not take the model, which is then left out; the last
        one that is left may not be.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(eq.data.load_digits().test.images[0]).save("zero.png")
        >>> from equilibria.report.attacked_files import attack_files
        >>> from equilibria.training.experiment import trained_model
        >>> run = trained_model("digits-opteq")
        >>> attack, cpu = eq.inputs.AttackSettings(eps=0.5), torch.device("cpu")
        >>> found = attack_files(run, [Path("zero.png")], [attack], cpu)
        >>> [one.before for one in found]
        ['0']
    """
    names = run.images.class_names
    if label is not None and label not in names:
        raise ValueError(f"{label!r} is none of the classes of the run: {', '.join(names)}")
    kinds = [s.method if len(attacks) > 1 else "attacked" for s in attacks]
    places: Sequence[tuple[Path | None, ...]] = [(None,) * len(attacks)] * len(files)
    if output is not None:
        places = drawn_files(files, output, *kinds, overwrite=overwrite)
        output.mkdir(parents=True, exist_ok=True)

    def read(item: tuple[Path, tuple[Path | None, ...]]) -> tuple[Tensor, int]:
        pixels = read_pixels(item[0], run.images.frame, is_gray=run.images.is_gray)
        pixels = pixels[None].to(device)
        said = _said(run, pixels)
        if said < 0:
            raise ValueError(f"{item[0]}: the model has no answer, its logits are NaN or infinite")
        return pixels, said

    found = readable(zip(files, places, strict=True), read, on_unreadable)
    refused: list[AttackSettings] = []
    for (file, targets), (pixels, before) in found:
        true = before if label is None else names.index(label)
        for settings, target in zip(attacks, targets, strict=True):
            if settings in refused:
                continue
            try:
                result = attack(run.model, pixels, torch.tensor([true], device=device), settings)
            except (TypeError, ValueError) as error:
                refused.append(settings)
                if on_refused is None or len(refused) == len(attacks):
                    raise
                on_refused(settings, error)
                continue
            after = int(result.predictions[0])
            in_file = None
            if target is not None:
                written = _in_bytes(pixels, result.images)
                write_atomically(target, image_png(written[0]))
                in_file = _said(run, written)
            status = None if result.status is None else Status(int(result.status[0]))
            yield AttackedFile(
                file=str(file),
                method=settings.method,
                label=names[true],
                before=names[before],
                after=None if after < 0 else names[after],
                changed=after != before,
                distance=float(result.distance[0]),
                steps=settings.chosen_steps,
                evaluations=result.evaluations,
                status="" if status is None else status.name.lower().replace("_", " "),
                attacked=None if target is None else str(target),
                after_in_file=None if in_file is None or in_file < 0 else names[in_file],
            )


@torch.no_grad()
def _said(run: RecipeModel, images: Tensor) -> int:
    return int(predicted_classes(run.model(images))[0])


def _in_bytes(image: Tensor, attacked: Tensor) -> Tensor:
    """The attacked image in whole bytes; what is cut off is cut towards the image, into eps."""
    steps = ((attacked - image).double() * BRIGHTEST).trunc()
    return (image + steps / BRIGHTEST).to(image.dtype).clamp(0, 1)
