"""`equilibria generate`: samples and reconstructions of a generator, and their quality."""

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
        Path, Argument(help="Run of a generator or autoencoder, or --model mnist-generator.")
    ],
    output: Annotated[
        Path,
        Option(
            help="PNG file of samples; reconstructions are written next to it.",
            callback=writable_file,
        ),
    ] = Path("equilibria-samples.png"),
    samples: Annotated[int, Option(min=1, help="Number of samples.")] = 64,
    density: Annotated[
        str | None,
        Option(help="Density of the latents: gmm or vae-gmm (default: that of the run)."),
    ] = None,
    latents: Annotated[
        int, Option(min=2, help="Number of training images whose latents the density is fitted to.")
    ] = 2000,
    images: Annotated[int, Option(min=2, help="Number of test images to reconstruct.")] = 500,
    overwrite: OverwriteFiles = False,
    seed: Seed = 0,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonObject = False,
    device: Device = "auto",
) -> None:
    """Draw samples and reconstructions with a trained generator, and measure their quality."""
    from equilibria.analysis.generation import generate as generate_images
    from equilibria.analysis.generation import generate_without_data
    from equilibria.report.generation import reconstruction_sheet, samples_sheet

    reconstructions = output.with_name(f"{output.stem}-reconstructions{output.suffix}")
    check_new(output, reconstructions, overwrite=overwrite)
    torch_device = eq.training.processes.choose_device(device)
    common: dict[str, Any] = {
        "samples": samples,
        "density": density,
        "latents": latents,
        "seed": seed,
    }
    written = [output]
    try:
        experiment = opened(run, torch_device, best, root)
    except eq.data.MissingDataError as missing:
        warn(
            f"the samples are not compared with images, because the data set is missing: {missing}"
        )
        chosen = opened_model(run, torch_device, best)
        result, drawn = generate_without_data(chosen, torch_device, run, **common)
    else:
        # Runs store latents of their last weights, not of their best.
        known = None if best else eq.training.packed.kept_latents(run)
        with progress_bar(silent=as_json) as progress:
            task = progress.add_task("fitting a density", total=None)

            def show(step: str, done: int, total: int) -> None:
                progress.update(task, description=step, completed=done, total=total)

            result, drawn, reconstructed = generate_images(
                experiment,
                torch_device,
                folder=run,
                images=images,
                known=known,
                on_step=show,
                **common,
            )
        eq.training.files.write_atomically(
            reconstructions, reconstruction_sheet(reconstructed, experiment.data).png()
        )
        written.append(reconstructions)
    eq.training.files.write_atomically(output, samples_sheet(drawn).png())
    if as_json:
        print_json(result)
        return
    facts = [
        (f"Density of {result.fitted_to} latents", result.density),
        ("FID of samples", shown(result.sample_fid, ".2f")),
    ]
    for quality in result.reconstructions:
        by = f"reconstructions ({quality.latents_by})"
        facts.append((f"PSNR of {by}, mean (dB)", f"{quality.psnr:.2f}"))
        facts.append((f"PSNR of {by}, median (dB)", f"{quality.median_psnr:.2f}"))
        facts.append((f"FID of {by}", shown(quality.fid, ".2f")))
    print_facts(f"{result.model} on {result.data}", facts)
    if result.features is not None:
        say(f"FID: {result.features}; {result.images} images on each side.")
    for path in written:
        say(f"Written: {path}")
