"""`equilibria certify`: what is proven of a classifier's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from equilibria.cli.app import (
    Best,
    Classifier,
    DataRoot,
    Device,
    ImagesOrTests,
    JsonList,
    OverwriteFiles,
    command,
)


@command(
    "certify",
    "equilibria certify runs/opteq",
    "equilibria certify runs/opteq digit.png folder-of-images",
    "equilibria certify --model digits-certified --samples 100",
    "equilibria certify runs/opteq --refine",
    "equilibria certify runs/opteq --tolerance 1e-2 --samples 200 --csv certificates.csv",
    "equilibria certify runs/opteq digit.png --json",
)
def certify(
    run: Classifier,
    files: ImagesOrTests = None,
    tolerance: Annotated[
        float | None, Option(help="Of the solves; that of the run's evaluation if not set.")
    ] = None,
    samples: Annotated[int, Option(min=1, help="Test images to certify.")] = 360,
    refine: Annotated[
        bool,
        Option(
            help="Larger radii by activation patterns, at many times the cost, for images that can "
            "gain more than 1 %."
        ),
    ] = False,
    batch_size: Annotated[int, Option(min=1, help="Images at a time.")] = 32,
    table: Annotated[
        Path | None, Option("--csv", help="CSV file, a line an image; - is standard output.")
    ] = None,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Say what is certain of a classifier's answers: class, error bars, radius, and why not.

    A class is certified if the exact equilibrium, in exact arithmetic, has it; a radius if no image
    that is closer (in L2, in pixels) has another. Exit code 1 if nothing can be certified.
    """
    from equilibria.cli.certifying import certify_images

    certify_images(
        run,
        files or [],
        tolerance=tolerance,
        samples=samples,
        refine=refine,
        batch_size=batch_size,
        table=table,
        overwrite=overwrite,
        root=root,
        best=best,
        as_json=as_json,
        device=device,
    )
