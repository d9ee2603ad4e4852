"""`equilibria explain`: why a classifier says what it says."""

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
    "explain",
    "equilibria explain runs/opteq",
    "equilibria explain runs/opteq digit.png folder-of-images --output why.html",
    "equilibria explain runs/geq --samples 24",
    "equilibria explain runs/opteq digit.png --json",
)
def explain(
    run: Classifier,
    files: ImagesOrTests = None,
    output: Annotated[
        Path | None,
        Option(help="HTML page; explanation.html in the folder of the run if not set, or here."),
    ] = None,
    samples: Annotated[int, Option(min=1, help="Test images to explain.")] = 9,
    overwrite: OverwriteFiles = False,
    root: DataRoot = None,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Say why a classifier says what it says: the terms of its objective that pulled the decision.

    The page also shows Grad-CAM, the gradient in the image, attention maps, the solve step by step,
    and what the features are like. With --json a page is written only if --output names it.
    """
    from equilibria.cli.explaining import explain_images

    explain_images(
        run,
        files or [],
        output=output,
        samples=samples,
        overwrite=overwrite,
        root=root,
        best=best,
        as_json=as_json,
        device=device,
    )
