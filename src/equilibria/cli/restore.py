"""`equilibria restore`: damaged images restored, and how far that came."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
from equilibria.cli.console import (
    print_facts,
    print_json,
    print_table,
    progress_bar,
    say,
    shown,
)
from equilibria.cli.faults import (
    check_new,
    complain,
    note_frames,
    unanswered,
    unreadable,
    warn,
    writable_folder,
)


@command(
    "restore",
    "equilibria restore --model photo noisy.jpg --output clean",
    "equilibria restore --model photo raw.png --task demosaic --compare",
    "equilibria restore runs/denoiser photo.jpg --output clean",
    "equilibria restore runs/denoiser photo.jpg --simulate",
    "equilibria restore runs/generator old.png --task inpaint --mask scratches.png --resize",
    "equilibria restore runs/generator digits --task denoise --noise 0.4 --stop-at-noise",
    "equilibria restore runs/generator --test 200 --task denoise --noise 0.2",
    "equilibria restore runs/generator --test 200 --task inpaint --prior 0.1",
)
def restore(
    run: Annotated[Path, Argument(help="Run of a generator, autoencoder or restorer.")],
    images: Annotated[list[Path] | None, Argument(help="Image files, or folders of them.")] = None,
    model: Annotated[
        str | None,
        Option(help="photo: the prior that comes with the program, in the place of RUN."),
    ] = None,
    simulate: Annotated[
        bool, Option("--simulate", help="Damage the images first, to compare with them.")
    ] = False,
    test: Annotated[
        int | None,
        Option(min=1, help="Damage and restore this many of the run's own test images instead."),
    ] = None,
    task: Annotated[
        str | None,
        Option(
            help="inpaint, denoise, deblur or superres (photo: demosaic); what the run learned if "
            "not set."
        ),
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
        int | None, Option(min=1, help="Side of the pieces of large pictures; 512 if not set.")
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
    strength: Annotated[
        float | None, Option(help="Of the photo prior; 1, or as the noise asks for.")
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Draw total variation beside the photo prior.")
    ] = False,
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

    Pictures are taken as they are, and keep their size where the model permits.
    """
    if model is not None:
        refused = _given(
            test=test,
            window=window,
            iterations=iterations,
            starts=starts,
            ridge=ridge,
            prior=prior,
            engine=engine,
            resize=resize or None,
            stop_at_noise=stop_at_noise or None,
            best=best or None,
        )
        if model != "photo" or refused:
            what = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
            raise ValueError(
                f"--model takes photo, not {model!r}: name the folder of a run instead"
                if model != "photo"
                else f"{what} is for runs: the photo prior has no such option"
            )
        asked = _given(blur=blur, factor=factor, noise=noise, mask=mask)
        settings = _given(strength=strength, tile=tile)
        _restore_photos(
            [run, *(images or [])],
            output,
            asked | {"task": task or "denoise", "simulate": simulate, "compare": compare},
            settings,
            seed=seed,
            overwrite=overwrite,
            as_json=as_json,
        )
        return
    if strength is not None or compare:
        raise ValueError("--strength and --compare are for --model photo")
    options = _given(noise=noise, window=window, width=blur, factor=factor)
    search = _given(iterations=iterations, starts=starts, ridge=ridge, engine=engine)
    problems: list[Exception] = []
    if _holds_images(run):
        paths = " ".join(map(str, [run, *(images or [])]))
        what = "is an image" if run.is_file() else "is a folder of images"
        raise ValueError(
            f"{run} {what}, not a trained model. To use the prior that comes with the program, "
            f"run `equilibria restore --model photo {paths}`"
        )
    if (test is None) == (not images):
        raise ValueError(
            "name image files or folders to restore, or --test N for N of the run's own test "
            "images, one of both"
        )
    if test is not None and (resize or mask is not None):
        raise ValueError("--mask and --resize are for image files: test images are undamaged")
    where = eq.training.choose_device(device)
    files = eq.data.find_images(images or [])
    chosen = opened_model(run, where, best) if test is None else opened(run, where, best, root)
    restorer = eq.report.Restorer(
        run=chosen,
        damage=eq.report.chosen_damage(chosen, task, options),
        device=where,
        search=search,
        stop_at_noise=stop_at_noise,
        seed=seed,
        tile=tile,
        prior=None if prior is None else eq.report.fitted_prior(run, prior, seed=seed),
    )
    if isinstance(chosen, eq.training.Experiment) and test is not None:
        check_new(output / eq.report.TEST_IMAGES, overwrite=overwrite)
        originals, labels = chosen.some_test_images(test)
        with progress_bar(silent=as_json) as bar:
            result = restorer.test_images(
                originals,
                output,
                partial(bar.track, description="restoring"),
                titles=eq.report.class_titles(chosen.data, labels),
            )
        if as_json:
            print_json(result)
        else:
            _show_test_images(result)
        complain(unanswered(result.unanswered, result.images))
        return
    if options and not (simulate or restorer.searches):
        raise ValueError(
            f"the run undoes {restorer.run.task.damage} as it was trained to: "  # type: ignore[attr-defined]
            f"{', '.join(options)} is for --simulate, or for generators"
        )
    work = eq.report.FileRestoration(restorer, simulate, mask, resize)
    _say_assumed(
        task,
        _given(blur=blur, factor=factor),
        blur=getattr(restorer.damage, "width", 0.0),
        factor=getattr(restorer.damage, "factor", 1),
        simulate=simulate,
    )
    some = work.run(files, output, overwrite=overwrite, on_unreadable=problems.append)
    found: list[eq.report.RestoredImage] = []
    with progress_bar(silent=as_json) as bar:
        found += bar.track(some, total=len(files), description="restoring")
    if as_json:
        print_json(found)
    elif found:
        _show_files(found)
    note_frames(files)
    silent = [image for image in found if not math.isfinite(image.misfit)]
    complain(unreadable(problems, len(files)), unanswered(len(silent), len(found)))


def _restore_photos(
    paths: list[Path],
    output: Path,
    asked: dict[str, Any],
    settings: dict[str, Any],
    *,
    seed: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """By the prior that comes with the package."""
    problems: list[Exception] = []
    chosen = eq.inputs.PhotoSettings(**settings)
    work = eq.report.PhotoFiles(eq.models.photo_prior(), settings=chosen, seed=seed, **asked)
    files = eq.data.find_images(paths)
    _say_assumed(work.task, asked, blur=work.blur, factor=work.factor, simulate=work.simulate)
    with progress_bar(silent=as_json) as bar:
        some = work.run(
            files,
            output,
            overwrite=overwrite,
            on_unreadable=problems.append,
            progress=partial(bar.track, description="pieces"),
        )
        found = list(bar.track(some, total=len(files), description="restoring"))
    if as_json:
        print_json(found)
    elif found:
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
            for photo in found
        ]
        _print_known(("File", "Restored", *columns), rows)
        for photo in found:
            say(f"{photo.file}: {photo.proven}. Drawn: {photo.sheet}")
    note_frames(files)
    complain(unreadable(problems, len(files)))


def _holds_images(place: Path) -> bool:
    """Whether a path is an image, or a folder of images that is no run."""
    from equilibria.data.finding import is_image

    if place.is_dir():
        is_run = eq.training.RunFolder(place).config.is_file()
        return not is_run and any(map(is_image, place.iterdir()))
    return place.is_file() and is_image(place)


def _say_assumed(
    task: str | None, options: Collection[str], *, blur: float, factor: int, simulate: bool
) -> None:
    """Report on standard error what is assumed of the damage because no option says it.

    Args:
        task: What is undone.
        options: Names of the options that were given.
        blur: Standard deviation of the blur in pixels.
        factor: How many times lower the resolution is.
        simulate: Whether the images are damaged first.
    """
    verb = "simulating" if simulate else "assuming"
    if task == "deblur" and "blur" not in options:
        warn(
            f"{verb} a Gaussian blur with a standard deviation of {blur:g} pixels; --blur changes "
            "it"
        )
    elif task == "superres" and "factor" not in options:
        warn(f"{verb} a resolution that is {factor} times lower; --factor changes it")


def _given(**options: Any) -> dict[str, Any]:
    """Those options that were not left out."""
    return {name: value for name, value in options.items() if value is not None}


def _show_test_images(found: eq.report.RestoredTestImages) -> None:
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


def _show_files(found: list[eq.report.RestoredImage]) -> None:
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
    _print_known(("File", "Restored", *columns), rows)
    if any(image.residual is not None for image in found):
        done = sum(image.status == "converged" for image in found)
        say(f"{done} of {len(found)} converged")
        worst = next((image for image in found if image.status not in ("converged", "")), None)
        if worst is not None:
            say(f"{worst.file}: {worst.message}")


def _print_known(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of files without the columns that are empty for all of them.

    Without an original there is no PSNR.
    """
    kept = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    columns = [headings[place] for place in kept]
    cells = [[row[place] for place in kept] for row in rows]
    print_table(columns, cells, right=headings[2:])
