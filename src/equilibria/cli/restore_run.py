"""`equilibria restore-run`: damaged images restored by a trained model, and how far that came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import (
    Best,
    DataRoot,
    Device,
    JsonList,
    OverwriteFiles,
    Seed,
    command,
    opened,
    opened_model,
)
from equilibria.cli.console import print_facts, print_json, progress_bar, say, shown
from equilibria.cli.faults import (
    check_new,
    complain,
    note_frames,
    unanswered,
    unreadable,
    writable_folder,
)
from equilibria.cli.restored import given, print_known, warn_of_assumption
from equilibria.cli.restored_files import BATCH, FileRestoration, RestoredImage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from equilibria.inputs import Prior
    from equilibria.restoration import Damage
    from equilibria.restoration.learned import ModelRestorer
    from equilibria.training.experiment import RecipeModel

TEST_IMAGES = "test-images.png"
PRIOR_DENSITY = {"name": "gmm", "ridge": 0.01}
"""Wider than what samples are drawn from: a latent between two of training is no less likely."""


@dataclass(frozen=True)
class RestoredTestImages:
    """Medians over the images, in decibel; PSNR is that of the pictures."""

    model: str
    data: str
    damage: str
    images: int
    unanswered: int
    """Those of which the model makes NaN or infinite pixels."""
    measured_psnr: float | None
    """None where what was measured is no picture."""
    model_psnr: float
    """Of the images as the model makes them."""
    restored_psnr: float
    """The same with what was seen put back, where it was seen without noise."""
    share_converged: float | None
    """None where nothing was solved."""
    mean_iterations: float | None
    message: str
    """On the first image whose solve did not converge, with the remedy; "" where all did."""
    sheet: str
    """Rows of originals, measurements, what the model made, and what was put back."""


@command(
    "restore-run",
    "equilibria restore-run runs/denoiser photo.jpg --output clean",
    "equilibria restore-run runs/denoiser photo.jpg --simulate",
    "equilibria restore-run runs/generator old.png --task inpaint --mask scratches.png --resize",
    "equilibria restore-run runs/generator digits --task denoise --noise 0.4 --stop-at-noise",
    "equilibria restore-run runs/generator --test 200 --task denoise --noise 0.2",
    "equilibria restore-run runs/generator --test 200 --task inpaint --prior 0.1",
)
def restore_run(
    run: Annotated[Path, Argument(help="Run of a generator, autoencoder or restorer.")],
    images: Annotated[list[Path] | None, Argument(help="Image files, or folders of them.")] = None,
    simulate: Annotated[
        bool, Option("--simulate", help="Damage the images first, to compare with them.")
    ] = False,
    test: Annotated[
        int | None,
        Option(min=1, help="Damage and restore this many of the run's own test images instead."),
    ] = None,
    task: Annotated[
        str | None,
        Option(help="inpaint, denoise, deblur or superres; what the run learned if not set."),
    ] = None,
    output: Annotated[
        Path, Option(help="Folder for the pictures.", callback=writable_folder)
    ] = Path("equilibria-restored"),
    noise: Annotated[
        float | None,
        Option(
            "--noise",
            "--sigma",
            help="Standard deviation of the noise, a fraction of the pixel range: 25/255 = 0.098.",
        ),
    ] = None,
    window: Annotated[
        float | None, Option(help="Side of the hidden window: a share, or pixels from 1.")
    ] = None,
    blur: Annotated[
        float | None,
        Option(help="Standard deviation of the blur in pixels; 1.5 if not set."),
    ] = None,
    factor: Annotated[
        int | None, Option(help="How many times lower the resolution is; 2 if not set.")
    ] = None,
    mask: Annotated[
        Path | None, Option(help="Image whose bright pixels are missing, to inpaint.")
    ] = None,
    resize: Annotated[
        bool, Option("--resize", help="Restore framed copies, in the size of training.")
    ] = False,
    tile: Annotated[
        int | None, Option(min=1, help="Side of the tiles of large pictures; 512 if not set.")
    ] = None,
    iterations: Annotated[int | None, Option(min=1, help="Of the search.")] = None,
    starts: Annotated[
        int | None, Option(min=1, help="Searches from random latents; the best counts.")
    ] = None,
    ridge: Annotated[
        float | None, Option(min=0, help="Weight of the latent's squared norm.")
    ] = None,
    prior: Annotated[
        float | None,
        Option(
            help="Weight of a mixture of Gaussians on the run's latents, in place of the ridge; "
            "twice the variance of the noise gives the most probable latent."
        ),
    ] = None,
    engine: Annotated[str | None, Option(help="Of the search: secant, adam, …")] = None,
    stop_at_noise: Annotated[
        bool, Option("--stop-at-noise", help="End where noise explains what is left.")
    ] = False,
    overwrite: OverwriteFiles = False,
    seed: Seed = 0,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Restore damaged pictures with a trained model: noisy ones, small ones, ones with holes.

    Pictures are taken as they are, and keep their size where the model permits. `equilibria
    restore` needs no run: it restores photographs with the prior that comes with the program.
    """
    import torch

    from equilibria.tasks.restoring import searches_latents

    options = given(noise=noise, window=window, width=blur, factor=factor)
    _check_arguments(run, images, test, takes_files=resize or mask is not None)
    where = eq.training.processes.choose_device(device)
    files = eq.data.find_images(images or [])
    chosen = opened_model(run, where, best) if test is None else opened(run, where, best, root)
    damage = eq.tasks.restoring.chosen_damage(chosen.model, chosen.task, task, **options)
    restorer = eq.tasks.restoring.restorer_of(
        chosen.model,
        chosen.task,
        channels=chosen.images.image_shape[0],
        tile=tile,
        stop_at_noise=stop_at_noise,
        prior=None if prior is None else _fitted_prior(run, prior, seed),
        seed=seed,
        **given(iterations=iterations, starts=starts, ridge=ridge, engine=engine),
    )
    if isinstance(chosen, eq.training.experiment.Experiment) and test is not None:
        check_new(output / TEST_IMAGES, overwrite=overwrite)
        originals, labels = chosen.some_test_images(test)
        with progress_bar(silent=as_json) as bar:
            result = _restored_tests(
                chosen,
                restorer,
                damage,
                originals.to(where),
                output,
                torch.Generator().manual_seed(seed),
                partial(bar.track, description="restoring"),
                eq.report.sheets.class_titles(chosen.data, labels),
            )
        if as_json:
            print_json(result)
        else:
            _show_test_images(result)
        complain(unanswered(result.unanswered, result.images))
        return
    if options and not (simulate or searches_latents(chosen.model, chosen.task)):
        raise ValueError(
            f"the run undoes {chosen.task.damage} as it was trained to: "  # type: ignore[attr-defined]
            f"{', '.join(options)} is for --simulate, or for generators"
        )
    work = FileRestoration(
        run=chosen,
        restorer=restorer,
        damage=damage,
        device=where,
        seed=seed,
        simulate=simulate,
        mask=mask,
        resize=resize,
    )
    if task is not None and blur is None and factor is None:
        warn_of_assumption(damage, simulate=simulate)
    problems: list[Exception] = []
    some = work.run_on(files, output, overwrite=overwrite, on_unreadable=problems.append)
    with progress_bar(silent=as_json) as bar:
        found = list(bar.track(some, total=len(files), description="restoring"))
    if as_json:
        print_json(found)
    elif found:
        _show_files(found)
    note_frames(files)
    silent = [image for image in found if not math.isfinite(image.misfit)]
    complain(unreadable(problems, len(files)), unanswered(len(silent), len(found)))


def _check_arguments(
    run: Path, images: Sequence[Path] | None, test: int | None, *, takes_files: bool
) -> None:
    """Raise a ValueError unless there are a run, and either image files or test images."""
    if _holds_images(run):
        paths = " ".join(map(str, [run, *(images or [])]))
        what = "is an image" if run.is_file() else "is a folder of images"
        raise ValueError(
            f"{run} {what}, not a trained model. To use the prior that comes with the program, "
            f"run `equilibria restore {paths}`"
        )
    if (test is None) == (not images):
        raise ValueError(
            "name image files or folders to restore, or --test N for N of the run's own test "
            "images, one of both"
        )
    if test is not None and takes_files:
        raise ValueError("--mask and --resize are for image files: test images are undamaged")


def _holds_images(place: Path) -> bool:
    """Whether a path is an image, or a folder of images that is no run."""
    from equilibria.data.finding import is_image

    if place.is_dir():
        is_run = eq.training.RunFolder(place).config.is_file()
        return not is_run and any(map(is_image, place.iterdir()))
    return place.is_file() and is_image(place)


def _fitted_prior(folder: Path, weight: float, seed: int) -> Prior:
    """Return a mixture of Gaussians on the latents that a run keeps of training images."""
    from equilibria.models.generators.densities import fit_density
    from equilibria.report.generation import known_latents

    known = known_latents(folder)
    return eq.inputs.Prior(fit_density(PRIOR_DENSITY, known, seed=seed).log_likelihood, weight)


def _restored_tests(
    run: RecipeModel,
    restorer: ModelRestorer,
    damage: Damage,
    originals: Tensor,
    output: Path,
    random: torch.Generator,
    progress: Callable[[Sequence[Tensor]], Iterable[Tensor]],
    titles: Sequence[str],
) -> RestoredTestImages:
    """Damage test images, restore them, and draw the first ones."""
    import torch

    from equilibria.report.restoration import rows_sheet
    from equilibria.tasks.image_quality import picture_psnr
    from equilibria.training.files import write_atomically

    batches = [
        restorer.restore(damage.corrupt(some, random))
        for some in progress(torch.split(originals, BATCH))
    ]
    generated = torch.cat([batch.generated for batch in batches])
    images = torch.cat([batch.images for batch in batches])
    pictures = [batch.picture for batch in batches if batch.picture is not None]
    picture = torch.cat(pictures) if pictures else None
    solves = [solve for batch in batches for solve in batch.solves if solve.status]
    iterations = [solve.iterations for solve in solves if solve.iterations is not None]
    unfinished = [solve.message for solve in solves if solve.status != "converged"]
    is_filled = any(batch.images is not batch.generated for batch in batches)
    name, data = run.recipe.model.name, run.recipe.data.name
    rows = {
        "measured": picture,
        "made by the model": generated,
        "seen pixels put back": images if is_filled else None,
    }
    sheet = output / TEST_IMAGES
    output.mkdir(parents=True, exist_ok=True)
    heading = f"{name} on test images of {data}: {damage.words}"
    write_atomically(sheet, rows_sheet(heading, originals, rows, titles))

    def median_psnr(some: Tensor) -> float:
        return float(picture_psnr(some, originals).median())

    return RestoredTestImages(
        model=name,
        data=data,
        damage=str(damage),
        images=len(originals),
        unanswered=int((~generated.flatten(1).isfinite().all(dim=1)).sum()),
        measured_psnr=None if picture is None else median_psnr(picture),
        model_psnr=median_psnr(generated),
        restored_psnr=median_psnr(images),
        share_converged=1 - len(unfinished) / len(solves) if solves else None,
        mean_iterations=sum(iterations) / len(iterations) if iterations else None,
        message=unfinished[0] if unfinished else "",
        sheet=str(sheet),
    )


def _show_test_images(found: RestoredTestImages) -> None:
    put_back = None if found.restored_psnr == found.model_psnr else found.restored_psnr
    rows = [
        ("PSNR of what was measured, median (dB)", shown(found.measured_psnr, ".2f")),
        ("PSNR of the model's images, median (dB)", shown(found.model_psnr, ".2f")),
        ("PSNR with what was seen put back, median (dB)", shown(put_back, ".2f")),
        ("Share converged", shown(found.share_converged, ".1%")),
        ("Iterations, mean", shown(found.mean_iterations, ".1f")),
    ]
    title = f"{found.images} test images of {found.data}, {found.damage}"
    print_facts(title, rows)
    if found.message:
        say(f"The first that did not converge: {found.message}")
    say(f"Drawn: {found.sheet}")


def _show_files(found: Sequence[RestoredImage]) -> None:
    columns = ("PSNR before", "PSNR after", "Misfit", "Status", "Residual", "Iterations")
    rows = [
        (
            image.file,
            image.restored,
            shown(image.measured_psnr, ".2f", " dB"),
            shown(image.restored_psnr, ".2f", " dB"),
            f"{image.misfit:.3g}",
            image.status,
            shown(image.residual, ".1e"),
            shown(image.iterations),
        )
        for image in found
    ]
    print_known(("File", "Restored", *columns), rows)
    if any(image.residual is not None for image in found):
        done = sum(image.status == "converged" for image in found)
        say(f"{done} of {len(found)} converged")
        worst = next((image for image in found if image.status not in ("converged", "")), None)
        if worst is not None:
            say(f"{worst.file}: {worst.message}")
