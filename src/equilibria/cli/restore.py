"""`equilibria restore`: restore photographs with the pretrained prior."""

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
from equilibria.cli.restoration_options import (
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
"""Command-line options of some kinds of damage, and their names in Python."""


@dataclass(frozen=True, kw_only=True)
class RestoredPhoto:
    """Result of restoring one photograph with the pretrained prior."""

    file: str
    restored: str
    sheet: str
    noise: float
    """Standard deviation of the noise, given or estimated."""
    strength: float | None
    """Weight λ of the prior, given or chosen by the discrepancy principle."""
    status: str
    iterations: int | None
    bound: float | None
    """Bound on the root mean square distance to the exact minimizer, in gray levels of 255; None if
    no bound is known."""
    proven: str
    measured_psnr: float | None
    restored_psnr: float | None
    variation_psnr: float | None
    """PSNR of the best of several total variations; None without --compare or an original."""


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
            help="Kind of damage: denoise, deblur, inpaint, superres, demosaic, …; an unknown name "
            "lists all."
        ),
    ] = "denoise",
    simulate: Annotated[
        bool,
        Option("--simulate", help="Damage the images first, and compare the results with them."),
    ] = False,
    output: Annotated[
        Path, Option(help="Folder for the pictures.", callback=writable_folder)
    ] = Path("equilibria-restored"),
    noise: Annotated[
        float | None,
        Option(
            "--noise",
            "--sigma",
            help="Standard deviation of the noise as a fraction of the pixel range (25/255 = "
            "0.098; default: estimated).",
        ),
    ] = None,
    blur: Annotated[
        float | None,
        Option(help="Standard deviation of the blur in pixels, for deblur (default: 1.5)."),
    ] = None,
    factor: Annotated[
        int | None,
        Option(help="Factor by which the resolution is reduced, for superres (default: 2)."),
    ] = None,
    mask: Annotated[
        Path | None, Option(help="Image that is white at missing pixels, for inpaint.")
    ] = None,
    strength: Annotated[
        float | None, Option(help="Weight of the prior (default: 1, or chosen from the noise).")
    ] = None,
    tile: Annotated[
        int | None,
        Option(min=1, help="Side of the tiles of large pictures, in pixels (default: 512)."),
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Also restore with total variation, for comparison.")
    ] = False,
    overwrite: OverwriteFiles = False,
    seed: Seed = 0,
    as_json: JsonList = False,
) -> None:
    """Restore photographs of any size with the pretrained prior.

    Removes noise or blur, fills missing pixels, raises the resolution, or demosaics. Without
    --simulate the images are assumed to be damaged. See `equilibria restore-run` for other models.
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
        work = _restore_files(
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
    """Settings of the restoration of photographs."""

    restorer: PhotoRestorer
    damage: Damage
    noise: float | None
    hidden: Tensor | None
    simulate: bool
    seed: int

    def problem(self, pixels: Tensor, random: torch.Generator) -> RestorationProblem:
        """Return the problem for a photograph, which is damaged first with `simulate`."""
        if not self.simulate:
            return self.damage.problem_of(pixels, self.noise, self.hidden)
        truth = self.damage.cropped(pixels)
        if self.hidden is None:
            return self.damage.corrupt(truth, random)
        problem = self.damage.problem_of(truth, self.noise, self.hidden)
        return eq.restoration.RestorationProblem(
            problem.measured, problem.measurement, problem.noise, truth
        )


def _restore_files(
    files: Sequence[Path],
    output: Path,
    photos: _Photos,
    *,
    compare: bool,
    overwrite: bool,
    on_unreadable: Callable[[Exception], None],
    progress: Callable[[Sequence[Any]], Iterable[Any]],
) -> Iterator[RestoredPhoto]:
    """Restore image files one by one, and write the pictures to the folder `output`."""
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

    def restore_file(item: tuple[Path, tuple[Path, ...]]) -> RestoredPhoto:
        file, (picture, sheet) = item
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

    items = list(zip(files, drawn, strict=True))
    for _, photo in readable(items, restore_file, on_unreadable):
        yield photo


def _damage(task: str, noise: float | None, options: dict[str, Any]) -> Damage:
    """Return the damage of a task; an option that the task does not use is an error."""
    from equilibria.registry import check_at_least, check_positive, check_positive_pixels
    from equilibria.restoration.damage import photo_tasks

    kinds = photo_tasks()
    if task not in kinds:
        raise ValueError(f"--task must be one of {', '.join(sorted(kinds))}, got {task!r}")
    if noise == 0:
        raise ValueError(
            "--noise must be positive (a fraction of the pixel range), got 0; leave it out to have "
            "the noise estimated"
        )
    check_positive_pixels(noise=noise)
    own = {name: {field.name for field in fields(kind)} for name, kind in kinds.items()}  # type: ignore[arg-type]
    for option in options:
        if FIELDS[option] not in own[task]:
            users = [name for name in own if FIELDS[option] in own[name]]
            raise ValueError(f"--{option} is for --task {' or '.join(users)}, not {task}")
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
            f"{first} is a trained model, not an image. To restore with this model, run "
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
        say(f"{photo.file}: {photo.proven}. Comparison: {photo.sheet}")
