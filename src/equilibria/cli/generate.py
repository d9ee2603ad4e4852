"""`equilibria generate`: new images of a trained generator, and how good they are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from equilibria.cli.console import fail, print_table
from equilibria.report.generation import Generation, generate
from equilibria.training import choose_device, trained, write_atomically


@dataclass(frozen=True)
class GenerationRequest:
    """What `equilibria generate` was asked for."""

    folder: Path
    output: Path
    samples: int
    density: str
    latents: int
    images: int
    best: bool
    seed: int
    device_name: str
    as_json: bool


def run_generation(request: GenerationRequest) -> None:
    """Fit a density to latents, draw samples and reconstructions, and measure both."""
    try:
        device = choose_device(request.device_name)
        experiment = trained(
            request.folder, device=device, weights="best" if request.best else "last"
        )
        found, samples, reconstructions = generate(
            experiment,
            device,
            folder=request.folder,
            samples=request.samples,
            density=request.density,
            latents=request.latents,
            images=request.images,
            seed=request.seed,
        )
        write_atomically(request.output, samples)
        write_atomically(reconstruction_file(request.output), reconstructions)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if request.as_json:
        print(json.dumps(asdict(found), indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    print_table(console, f"{found.model} on {found.data}", _rows(found))
    if found.features is not None:
        console.print(f"FID: {found.features}; {found.images} images a side.", soft_wrap=True)
    for path in (request.output, reconstruction_file(request.output)):
        console.print(f"Drawn: {path}", soft_wrap=True)


def reconstruction_file(output: Path) -> Path:
    """Where the originals stand above their reconstructions."""
    return output.with_name(f"{output.stem}-reconstructions{output.suffix}")


def _rows(found: Generation) -> list[tuple[str, str]]:
    rows = [(f"Density of {found.fitted_to} latents", found.density)]
    if found.sample_fid is not None:
        rows.append(("FID of samples", f"{found.sample_fid:.2f}"))
    for some in found.reconstructions:
        by = f"reconstructions ({some.latents_by})"
        rows.append((f"PSNR of {by}, mean (dB)", f"{some.psnr:.2f}"))
        rows.append((f"PSNR of {by}, median (dB)", f"{some.median_psnr:.2f}"))
        if some.fid is not None:
            rows.append((f"FID of {by}", f"{some.fid:.2f}"))
    return rows
