"""`equilibria generate`: new images of a trained generator, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import (
    Best,
    DataRoot,
    Device,
    JsonObject,
    OverwriteFiles,
    Seed,
    command,
    opened,
    opened_model,
)
from equilibria.cli.console import print_facts, print_json, progress_bar, say, shown
from equilibria.cli.faults import check_new, warn, writable_file


@command(
    "generate",
    "equilibria generate --model mnist-generator",
    "equilibria generate runs/generator",
    "equilibria generate runs/vae --samples 64 --output samples.png --density vae-gmm",
)
def generate(
    run: Annotated[
        Path, Argument(help="Run of a generator or an autoencoder, or --model mnist-generator.")
    ],
    output: Annotated[
        Path,
        Option(help="PNG of samples; reconstructions are drawn beside it.", callback=writable_file),
    ] = Path("equilibria-samples.png"),
    samples: Annotated[int, Option(min=1, help="Images to draw.")] = 64,
    density: Annotated[
        str | None, Option(help="Of the latents: gmm or vae-gmm; the run's own if not set.")
    ] = None,
    latents: Annotated[
        int, Option(min=2, help="Training images whose latents the density is fitted to.")
    ] = 2000,
    images: Annotated[
        int, Option(min=2, help="Test images that are reconstructed and compared with.")
    ] = 500,
    overwrite: OverwriteFiles = False,
    seed: Seed = 0,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonObject = False,
    device: Device = "auto",
) -> None:
    """Draw new images and reconstructions with a trained generator, and measure both."""
    reconstructions = output.with_name(f"{output.stem}-reconstructions{output.suffix}")
    check_new(output, reconstructions, overwrite=overwrite)
    where = eq.training.processes.choose_device(device)
    common: dict[str, Any] = {
        "samples": samples,
        "density": density,
        "latents": latents,
        "seed": seed,
    }
    written = [output]
    try:
        experiment = opened(run, where, best, root)
    except eq.data.MissingDataError as missing:
        warn(f"without the data of the run samples are drawn, but nothing is compared: {missing}")
        chosen = opened_model(run, where, best)
        found, drawn = eq.report.generation.generate_without_data(chosen, where, run, **common)
    else:
        # A run keeps the latents of its last weights, not those of its best.
        known = None if best else eq.training.packed.kept_latents(run)
        with progress_bar(silent=as_json) as progress:
            task = progress.add_task("a density of latents", total=None)

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            found, drawn, drawn_again = eq.report.generate(
                experiment, where, folder=run, images=images, known=known, on_step=show, **common
            )
        eq.training.files.write_atomically(reconstructions, drawn_again.png())
        written.append(reconstructions)
    eq.training.files.write_atomically(output, drawn.png())
    if as_json:
        print_json(found)
        return
    facts = [
        (f"Density of {found.fitted_to} latents", found.density),
        ("FID of samples", shown(found.sample_fid, ".2f")),
    ]
    for some in found.reconstructions:
        by = f"reconstructions ({some.latents_by})"
        facts.append((f"PSNR of {by}, mean (dB)", f"{some.psnr:.2f}"))
        facts.append((f"PSNR of {by}, median (dB)", f"{some.median_psnr:.2f}"))
        facts.append((f"FID of {by}", shown(some.fid, ".2f")))
    print_facts(f"{found.model} on {found.data}", facts)
    if found.features is not None:
        say(f"FID: {found.features}; {found.images} images a side.")
    for path in written:
        say(f"Drawn: {path}")
