"""`equilibria train`: a model as a recipe says."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import Device, Overwrite, command


@command(
    "train",
    "equilibria train digits-opteq --output runs/opteq",
    "equilibria train photos/ --output runs/photos",
    "equilibria train labels.csv data.options.size=96 training.epochs=30 --output runs/table",
    "equilibria train digits-opteq training.epochs=3 training.seed=1 --output runs/short",
    "equilibria train my-recipe.yaml --output runs/mine --resume",
    "equilibria train digits-opteq --devices 2",
    "torchrun --nproc_per_node=2 -m equilibria train digits-opteq",
)
def train(
    recipe: Annotated[
        str,
        Argument(
            metavar="RECIPE|IMAGES",
            help="A YAML file, or a name: `equilibria recipes`. Or a folder of images, one folder "
            "a class, or a CSV of files and labels: a recipe is then chosen.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE...", help="Changes to the recipe.")
    ] = None,
    output: Annotated[Path, Option(help="Folder of the run.")] = Path("equilibria-run"),
    resume: Annotated[
        bool, Option(help="Go on from the last checkpoint in the folder, if there is one.")
    ] = False,
    overwrite: Overwrite = False,
    device: Device = "auto",
    devices: Annotated[
        int, Option(min=1, help="Processes that share every batch, each with its own GPU.")
    ] = 1,
    tensorboard: Annotated[
        bool, Option("--tensorboard", help="Log to the folder `tensorboard` of the run too.")
    ] = False,
) -> None:
    """Train a model as a recipe says, or on images of your own."""
    from equilibria.cli.training import launch, train_as_asked, train_in_group

    changes = overrides or []
    work = partial(train_as_asked, recipe, changes, output, resume, overwrite, tensorboard)
    place = eq.training.Place.from_environment()
    if place is not None:
        if devices > 1:
            raise ValueError(f"torchrun has started {place.count} processes: leave out --devices")
        train_in_group(place, device, work)
    elif devices == 1:
        work(eq.training.choose_device(device), eq.training.ALONE)
    else:
        # A mistake shows before the processes start.
        eq.training.load_recipe(recipe, changes)
        eq.training.Place(0, devices, 0, devices).device(device)
        launch(devices, train_in_group, device, work)
