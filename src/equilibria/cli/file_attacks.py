"""Attacks on image files: predictions of a classifier before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import equilibria as eq

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from equilibria.inputs import AttackSettings
    from equilibria.training.experiment import RecipeModel


@dataclass(frozen=True)
class AttackedFile:
    """Result of one attack on one image file."""

    file: str
    method: str
    label: str
    """The class that the attack moves the image away from."""
    before: str
    after: str | None
    """Prediction for the attacked image; None if the logits are not finite."""
    changed: bool
    """Whether `after` differs from `before`."""
    distance: float
    """Distance between the original and the attacked image, in the norm of the attack."""
    steps: int
    evaluations: int
    """Number of evaluations of the equilibrium map, or of a model without one, per attack."""
    status: str
    """Solver status of JIIO; empty for other methods."""
    attacked: str | None
    """File of the attacked image, if it was written."""
    after_in_file: str | None
    """Prediction for that file, whose pixels are rounded to 8 bits."""


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
    """Attack image files one by one, with each of several methods.

    Args:
        run: Trained classifier.
        files: Image files; they are resized and cropped like the training images.
        attacks: Settings of the attacks.
        device: Device on which the attacks run.
        label: True class of all files; by default the prediction for each.
        output: Folder for the attacked images; they are not written if None.
        overwrite: Replace attacked images that exist.
        on_unreadable: Called with the error of a file that cannot be read, which is then skipped.
        on_refused: Called with an attack that does not support the model, and the error; the attack
            is then skipped. If no attack supports the model, the last error is raised.

    Yields:
        One result per file and attack.

    Raises:
        ValueError: If `label` is not a class of the run.

    Examples:
        >>> from pathlib import Path
        >>> eq.data.image_from_tensor(eq.data.load_digits().test.images[0]).save("zero.png")
        >>> from equilibria.cli.file_attacks import attack_files
        >>> from equilibria.training.experiment import trained_model
        >>> run = trained_model("digits-opteq")
        >>> attack, cpu = eq.inputs.AttackSettings(eps=0.5), torch.device("cpu")
        >>> results = attack_files(run, [Path("zero.png")], [attack], cpu)
        >>> [result.before for result in results]
        ['0']
    """
    import torch

    from equilibria.data.image_files import readable
    from equilibria.report.figures import drawn_files
    from equilibria.report.sheets import image_png
    from equilibria.training.files import write_atomically

    names = run.images.class_names
    if label is not None and label not in names:
        raise ValueError(f"{label!r} is not a class of the run; its classes are {', '.join(names)}")
    suffixes = [s.method if len(attacks) > 1 else "attacked" for s in attacks]
    targets_per_file: Sequence[tuple[Path | None, ...]] = [(None,) * len(attacks)] * len(files)
    if output is not None:
        targets_per_file = drawn_files(files, output, *suffixes, overwrite=overwrite)
        output.mkdir(parents=True, exist_ok=True)

    def read(item: tuple[Path, tuple[Path | None, ...]]) -> tuple[Tensor, int]:
        pixels = eq.data.read_pixels(item[0], run.images.frame, is_gray=run.images.is_gray)
        pixels = pixels[None].to(device)
        prediction = _prediction(run, pixels)
        if prediction < 0:
            raise ValueError(f"{item[0]}: the logits of the model are NaN or infinite")
        return pixels, prediction

    images = readable(zip(files, targets_per_file, strict=True), read, on_unreadable)
    refused: list[AttackSettings] = []
    for (file, targets), (pixels, before) in images:
        true = before if label is None else names.index(label)
        for settings, target in zip(attacks, targets, strict=True):
            if settings in refused:
                continue
            try:
                result = eq.inputs.attack(
                    run.model, pixels, torch.tensor([true], device=device), settings
                )
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
                in_file = _prediction(run, written)
            status = None if result.status is None else eq.Status(int(result.status[0]))
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


def _prediction(run: RecipeModel, images: Tensor) -> int:
    import torch

    from equilibria.models.base import predicted_classes

    with torch.no_grad():
        return int(predicted_classes(run.model(images))[0])


def _in_bytes(image: Tensor, attacked: Tensor) -> Tensor:
    """Round an attacked image to 8 bits, towards the original, so that it stays within eps."""
    from equilibria.data.image_files import BRIGHTEST

    steps = ((attacked - image).double() * BRIGHTEST).trunc()
    return (image + steps / BRIGHTEST).to(image.dtype).clamp(0, 1)
