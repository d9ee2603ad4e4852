"""`equilibria generate`: new images of a trained generator, and how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from equilibria.cli.app import MAX_SEED, Best, Device, JsonObject, command
from equilibria.cli.console import (
    fact_rows,
    one_line_errors,
    print_facts,
    print_json,
    print_line,
)
from equilibria.report import generation
from equilibria.training import choose_device, trained, write_atomically


@command(
    "generate",
    "equilibria generate runs/generator",
    "equilibria generate runs/vae --samples 64 --output samples.png --density vae-gmm",
)
def generate(
    run: Annotated[Path, typer.Argument(help="Run of a generator or an autoencoder.")],
    output: Annotated[
        Path, typer.Option(help="PNG of samples; reconstructions are drawn beside it.")
    ] = Path("equilibria-samples.png"),
    samples: Annotated[int, typer.Option(min=1, help="Images to draw.")] = 64,
    density: Annotated[str, typer.Option(help="Of the latents: gmm or vae-gmm.")] = "gmm",
    latents: Annotated[
        int, typer.Option(min=2, help="Training images whose latents the density is fitted to.")
    ] = 2000,
    images: Annotated[
        int, typer.Option(min=2, help="Test images that are reconstructed and compared with.")
    ] = 500,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of density and samples.")] = 0,
    best: Best = False,
    as_json: JsonObject = False,
    device: Device = "auto",
) -> None:
    """Draw new images and reconstructions with a trained generator, and measure both."""
    reconstructions = output.with_name(f"{output.stem}-reconstructions{output.suffix}")
    with one_line_errors():
        where = choose_device(device)
        experiment = trained(run, device=where, weights="best" if best else "last")
        found, drawn, drawn_again = generation.generate(
            experiment,
            where,
            folder=run,
            samples=samples,
            density=density,
            latents=latents,
            images=images,
            seed=seed,
        )
        write_atomically(output, drawn)
        write_atomically(reconstructions, drawn_again)
    if as_json:
        print_json(found)
        return
    facts: list[tuple[str, Any, str]] = [
        (f"Density of {found.fitted_to} latents", found.density, ""),
        ("FID of samples", found.sample_fid, ".2f"),
    ]
    for some in found.reconstructions:
        by = f"reconstructions ({some.latents_by})"
        facts.append((f"PSNR of {by}, mean (dB)", some.psnr, ".2f"))
        facts.append((f"PSNR of {by}, median (dB)", some.median_psnr, ".2f"))
        facts.append((f"FID of {by}", some.fid, ".2f"))
    print_facts(f"{found.model} on {found.data}", fact_rows(facts))
    if found.features is not None:
        print_line(f"FID: {found.features}; {found.images} images a side.")
    for path in (output, reconstructions):
        print_line(f"Drawn: {path}")
