"""`equilibria predict`: what a trained model sees in image files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from equilibria.cli.app import (
    Best,
    Certified,
    Device,
    JsonList,
    OverwriteFiles,
    SomeRun,
    command,
)


@command(
    "predict",
    "equilibria predict runs/opteq digit.png",
    "equilibria predict --model digits-opteq digit.png",
    "equilibria predict runs/opteq folder-of-images --top 3 --csv predictions.csv",
    "equilibria predict runs/opteq folder-of-images --json",
    "equilibria predict runs/opteq folder-of-images --certified",
    "equilibria predict runs/camvid street.png --output drawn",
)
def predict(
    run: SomeRun,
    images: Annotated[list[Path], Argument(help="Image files, or folders of them.")],
    top: Annotated[
        int | None, Option(min=1, help="Classes to name, with their confidences, of each image.")
    ] = None,
    table: Annotated[
        Path | None, Option("--csv", help="CSV file, a line an image; - is standard output.")
    ] = None,
    output: Annotated[
        Path,
        Option(help="Folder for the pictures, if the run segments images."),
    ] = Path("equilibria-predictions"),
    certified: Certified = False,
    overwrite: OverwriteFiles = False,
    best: Best = False,
    as_json: JsonList = False,
    device: Device = "auto",
) -> None:
    """Classify image files, or their pixels, with a trained model; its data set is not needed."""
    from equilibria.cli.predicting import predict_files

    predict_files(
        run,
        images,
        top=top,
        table=table,
        output=output,
        certified=certified,
        overwrite=overwrite,
        best=best,
        as_json=as_json,
        device=device,
    )
