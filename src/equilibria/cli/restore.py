"""`equilibria restore`: photographs, restored by the prior that comes with the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import JsonList, OverwriteFiles, Seed, command
from equilibria.cli.console import print_json, progress_bar, say, shown
from equilibria.cli.faults import complain, note_frames, unreadable, writable_folder
from equilibria.cli.restored import (
    check_mask,
    given,
    hidden_pixels,
    print_known,
    psnr_of,
    warn_of_assumption,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from equilibria.restoration import Damage, PhotoRestorer, RestorationProblem

FIELDS = {"blur": "width", "factor": "factor"}
"""Options of some kinds of damage, and their names in Python."""


@dataclass(frozen=True, kw_only=True)
class RestoredPhoto:
    """One image file."""

    file: str
    restored: str
    sheet: str
    noise: float
    """Standard deviation that was given or estimated."""
    strength: float | None
    """λ of the prior: the one given, or the one that the discrepancy principle found."""
    status: str
    iterations: int | None
    bound: float | None
    """Proven root mean square distance to the exact minimizer, in gray levels of 255; None where
    nothing is proven."""
    proven: str
    measured_psnr: float | None
    restored_psnr: float | None
    variation_psnr: float | None
    """Of the best of several total variations; None without --compare, or without an original."""


@command(
    "restore",
    "equilibria restore noisy.jpg --output clean",
    "equilibria restore soft.jpg --task deblur --blur 1.5",
    "equilibria restore old.png --task inpaint --mask scratches.png",
    "equilibria restore photo.png --task demosaic --simulate --compare",
)
def restore(
    images: Annotated[list[Path], Argument(help="Image files, or folders of them.")],
    task: Annotated[
        str,
        Option(
            help="What is undone: denoise, deblur, inpaint, superres, demosaic, …; an unknown name "
            "lists all."
        ),
    ] = "denoise",
    simulate: Annotated[
        bool, Option("--simulate", help="Damage the images first, to compare with them.")
    ] = False,
    output: Annotated[
        Path, Option(help="Folder for the pictures.", callback=writable_folder)
    ] = Path("equilibria-restored"),
    noise: Annotated[
        float | None,
        Option(
            "--noise",
            "--sigma",
            help="Standard deviation of the noise, a fraction of the pixel range (25/255 = 0.098); "
            "estimated if not set.",
        ),
    ] = None,
    blur: Annotated[
        float | None,
        Option(help="Standard deviation of the blur in pixels, for deblur; 1.5 if not set."),
    ] = None,
    factor: Annotated[
        int | None,
        Option(help="How many times lower the resolution is, for superres; 2 if not set."),
    ] = None,
    mask: Annotated[
        Path | None, Option(help="Image whose bright pixels are missing, for inpaint.")
    ] = None,
    strength: Annotated[
        float | None, Option(help="Of the prior; 1, or as the noise requires, if not set.")
    ] = None,
    tile: Annotated[
        int | None, Option(min=1, help="Side of the tiles of large pictures; 512 if not set.")
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Draw total variation beside the result.")
    ] = False,
    overwrite: OverwriteFiles = False,
    seed: Seed = 0,
    as_json: JsonList = False,
) -> None:
    """Restore photographs of any size with the prior that comes with the program.

    It takes away noise, blur, holes, a low resolution, or a camera's mosaic. Pictures are taken as
    they are. `equilibria restore-run` restores with a model of your own.
    """
    _check_images(images)
    damage = _damage(task, noise, given(blur=blur, factor=factor))
    check_mask(damage, mask, simulate=simulate)
    restorer = eq.restoration.PhotoRestorer(
        eq.models.photo_prior(), trace=True, **given(strength=strength, tile=tile)
    )
    files = eq.data.find_images(images)
    if not given(blur=blur, factor=factor):
        warn_of_assumption(damage, simulate=simulate)
    problems: list[Exception] = []
    with progress_bar(silent=as_json) as bar:
        work = _restored_files(
            files,
            output,
            _Photos(
                restorer, damage, noise, hidden_pixels(mask, eq.images.AS_ON_DISK), simulate, seed
            ),
            compare=compare,
            overwrite=overwrite,
            on_unreadable=problems.append,
            progress=partial(bar.track, description="tiles"),
        )
        photos = list(bar.track(work, total=len(files), description="restoring"))
    if as_json:
        print_json(photos)
    elif photos:
        _show(photos)
    note_frames(files)
    complain(unreadable(problems, len(files)))


@dataclass(frozen=True)
class _Photos:
    """How the photographs of one command are restored."""

    restorer: PhotoRestorer
    damage: Damage
    noise: float | None
    hidden: Tensor | None
    simulate: bool
    seed: int

    def problem(self, pixels: Tensor, random: torch.Generator) -> RestorationProblem:
        """What is measured of a photograph, or what a photograph was measured as."""
        if not self.simulate:
            return self.damage.problem_of(pixels, self.noise, self.hidden)
        truth = self.damage.cropped(pixels)
        if self.hidden is None:
            return self.damage.corrupt(truth, random)
        problem = self.damage.problem_of(truth, self.noise, self.hidden)
        return eq.restoration.RestorationProblem(
            problem.measured, problem.measurement, problem.noise, truth
        )


def _restored_files(
    files: Sequence[Path],
    output: Path,
    photos: _Photos,
    *,
    compare: bool,
    overwrite: bool,
    on_unreadable: Callable[[Exception], None],
    progress: Callable[[Sequence[Any]], Iterable[Any]],
) -> Iterator[RestoredPhoto]:
    """Restore the images in files, one by one, and draw them into the folder `output`."""
    import torch

    from equilibria.data import read_pixels
    from equilibria.data.image_files import BRIGHTEST, check_detail, readable
    from equilibria.images import AS_ON_DISK
    from equilibria.report.figures import drawn_files
    from equilibria.report.restoration import photo_sheet
    from equilibria.report.sheets import image_png
    from equilibria.restoration.total_variation import best_variation
    from equilibria.training.files import write_atomically

    drawn = drawn_files(files, output, "restored", "sheet", overwrite=overwrite)
    output.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(photos.seed)

    def one(place: tuple[Path, tuple[Path, ...]]) -> RestoredPhoto:
        file, (picture, sheet) = place
        check_detail(file)
        pixels = read_pixels(file, AS_ON_DISK, is_gray=None)[None]
        problem = photos.problem(pixels, random)
        restored = photos.restorer.restore(problem, progress=progress)
        variation = best_variation(problem) if compare else None
        write_atomically(picture, image_png(restored.images[0]))
        write_atomically(sheet, photo_sheet(file.name, restored, variation))
        bound = None if restored.bound is None else float(restored.bound[0]) * BRIGHTEST
        return RestoredPhoto(
            file=str(file),
            restored=str(picture),
            sheet=str(sheet),
            noise=problem.noise,
            strength=restored.strength,
            status=restored.solves[0].status,
            iterations=restored.solves[0].iterations,
            bound=bound,
            proven=restored.statement,
            measured_psnr=psnr_of(restored.picture, problem.truth),
            restored_psnr=psnr_of(restored.images, problem.truth),
            variation_psnr=psnr_of(variation, problem.truth),
        )

    places = list(zip(files, drawn, strict=True))
    for _, photo in readable(places, one, on_unreadable):
        yield photo


def _damage(task: str, noise: float | None, options: dict[str, Any]) -> Damage:
    """Return the damage of a task; an option that the task does not use is an error."""
    from equilibria.registry import check_at_least, check_positive, check_positive_pixels
    from equilibria.restoration.damage import photo_tasks

    kinds = photo_tasks()
    if task not in kinds:
        raise ValueError(f"the photo prior knows {', '.join(sorted(kinds))}, not {task!r}")
    if noise == 0:
        raise ValueError(
            "a noise of zero leaves nothing to restore: give a positive --noise, in units of "
            "the brightest pixel, or none to have it estimated"
        )
    check_positive_pixels(noise=noise)
    own = {name: {field.name for field in fields(kind)} for name, kind in kinds.items()}  # type: ignore[arg-type]
    for option in options:
        if FIELDS[option] not in own[task]:
            users = [name for name in own if FIELDS[option] in own[name]]
            raise ValueError(f"--{option} is for --task {' or '.join(users)}, not for {task}")
    check_positive(blur=options.get("blur"))
    check_at_least(2, factor=options.get("factor"))
    chosen = {FIELDS[option]: value for option, value in options.items()}
    return kinds[task](noise=kinds[task].photo_noise if noise is None else noise, **chosen)  # type: ignore[call-arg]


def _check_images(paths: Sequence[Path]) -> None:
    """Raise a ValueError if the first path is a run or a trained model, not an image."""
    first = paths[0]
    is_run = first.is_dir() and eq.training.RunFolder(first).config.is_file()
    is_named = not first.exists() and str(first) in eq.models.pretrained_cards()
    if is_run or is_named:
        raise ValueError(
            f"{first} is a trained model, not an image. To restore with it, run "
            f"`equilibria restore-run {' '.join(map(str, paths))}`"
        )


def _show(photos: Sequence[RestoredPhoto]) -> None:
    columns = ("Noise", "PSNR before", "PSNR after", "Total variation", "Iterations")
    rows = [
        (
            photo.file,
            photo.restored,
            f"{photo.noise:.3f}",
            shown(photo.measured_psnr, ".2f", " dB"),
            shown(photo.restored_psnr, ".2f", " dB"),
            shown(photo.variation_psnr, ".2f", " dB"),
            shown(photo.iterations),
        )
        for photo in photos
    ]
    print_known(("File", "Restored", *columns), rows)
    for photo in photos:
        say(f"{photo.file}: {photo.proven}. Drawn: {photo.sheet}")
