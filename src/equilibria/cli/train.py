"""`equilibria train`: a model as a recipe says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import DataRoot, Device, Overwrite, command


@command(
    "train",
    "equilibria train digits-opteq --output runs/opteq",
    "equilibria train photos/ --output runs/photos",
    "equilibria train labels.csv data.options.size=96 training.epochs=30 --output runs/table",
    "equilibria train digits-opteq training.epochs=3 training.seed=1 --output runs/short",
    "equilibria train my-recipe.yaml --root data --output runs/mine",
    "equilibria train --resume --output runs/mine",
    "equilibria train --epochs +5 --output runs/mine",
    "equilibria train digits-opteq training.epochs=3 --from runs/mine --output runs/tuned",
    "equilibria train digits-opteq --devices 2",
    "torchrun --nproc_per_node=2 -m equilibria train digits-opteq",
)
def train(
    recipe: Annotated[
        str | None,
        Argument(
            metavar="RECIPE|IMAGES",
            help="A YAML file, or a name: `equilibria recipes`. Or a folder of images, one folder "
            "a class, or a CSV of files and labels: a recipe is then chosen. With --resume, the "
            "recipe of the run if not set.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE...", help="Changes to the recipe.")
    ] = None,
    output: Annotated[Path, Option(help="Folder of the run.")] = Path("equilibria-run"),
    resume: Annotated[
        bool, Option(help="Go on from the last checkpoint in the folder, if there is one.")
    ] = False,
    epochs: Annotated[
        str | None,
        Option(
            metavar="N|+N",
            help="How many in all; +5 goes on with the run in the folder for five more.",
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        Option("--from", metavar="RUN", help="Start with the weights of another run."),
    ] = None,
    overwrite: Overwrite = False,
    root: DataRoot = None,
    device: Device = "auto",
    devices: Annotated[
        int, Option(min=1, help="Processes that share every batch, each with its own GPU.")
    ] = 1,
    tensorboard: Annotated[
        bool, Option("--tensorboard", help="Log to the folder `tensorboard` of the run too.")
    ] = False,
    report: Annotated[
        bool, Option(help="End with report.html in the folder of the run, in some seconds.")
    ] = True,
    as_json: Annotated[
        bool, Option("--json", help="The evaluation as one JSON object; the rest to stderr.")
    ] = False,
) -> None:
    """Train a model as a recipe says, or on images of your own."""
    from equilibria.cli.training import Asked, launch, train_as_asked, train_in_group

    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        overrides, recipe = [recipe, *(overrides or [])], None  # A change, of the run's own recipe.
    if root is not None:
        overrides = [*(overrides or []), f"data.root={json.dumps(str(root))}"]
    asked = Asked(
        recipe=recipe,
        overrides=overrides or [],
        output=output,
        resume=resume,
        overwrite=overwrite,
        epochs=epochs,
        start_from=start_from,
        tensorboard=tensorboard,
        report=report,
        as_json=as_json,
    )
    work = partial(train_as_asked, asked)
    place = eq.training.Place.from_environment()
    if place is not None:
        if devices > 1:
            raise ValueError(f"torchrun has started {place.count} processes: leave out --devices")
        train_in_group(place, device, work)
    elif devices == 1:
        work(eq.training.choose_device(device), eq.training.ALONE)
    else:
        # A mistake shows before the processes start.
        asked.plan()
        eq.training.Place(0, devices, 0, devices).device(device)
        launch(devices, train_in_group, device, work)
