"""`equilibria train`: a model as a recipe says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
import yaml
from rich.console import Console

from equilibria.cli.app import Device, command
from equilibria.cli.console import (
    TrainingDisplay,
    fail,
    one_line_errors,
    output_console,
    print_facts,
)
from equilibria.cli.evaluate import as_data, rows
from equilibria.cli.launch import launch
from equilibria.models import parameter_count
from equilibria.report.compare import store_evaluation
from equilibria.training import (
    ALONE,
    EpochMetrics,
    Experiment,
    NonFiniteError,
    Place,
    Processes,
    ProcessLostError,
    RunFolder,
    choose_device,
    joined_group,
    load_recipe,
)
from equilibria.training.metrics import TensorBoardLog

Work = Callable[[torch.device, Processes], None]


@command(
    "train",
    "equilibria train digits-opteq --output runs/opteq",
    "equilibria train digits-opteq training.epochs=3 training.seed=1 --output runs/short",
    "equilibria train my-recipe.yaml --output runs/mine --resume",
    "equilibria train digits-opteq --devices 2",
    "torchrun --nproc_per_node=2 -m equilibria train digits-opteq",
)
def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a name: `equilibria recipes`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Changes to the recipe.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("equilibria-run"),
    resume: Annotated[
        bool, typer.Option(help="Go on from the last checkpoint in the folder, if there is one.")
    ] = False,
    device: Device = "auto",
    devices: Annotated[
        int, typer.Option(min=1, help="Processes that share every batch, each with its own GPU.")
    ] = 1,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log to the folder `tensorboard` of the run too.")
    ] = False,
) -> None:
    """Train a model as a recipe says."""
    changes = overrides or []
    work = partial(_train, recipe, changes, output, resume, tensorboard)
    place = Place.from_environment()
    if place is not None:
        if devices > 1:
            fail(f"torchrun has started {place.count} processes: leave out --devices")
        try:
            train_in_group(place, device, work)
        except ProcessLostError as error:
            fail(str(error), code=1)
    elif devices == 1:
        with one_line_errors():
            alone = choose_device(device)
        work(alone, ALONE)
    else:
        with one_line_errors():  # A mistake shows before the processes start.
            load_recipe(recipe, changes)
            Place(0, devices, 0, devices).device(device)
        launch(devices, train_in_group, device, work)


def train_in_group(place: Place, device_name: str, work: Work) -> None:
    """Train as one of several processes."""
    if place.rank > 0:
        warnings.simplefilter("ignore")  # The first process says the same.
    try:
        device = place.device(device_name)
    except ValueError as error:
        if place.rank > 0:
            raise typer.Exit(2) from None
        fail(str(error))
    torch.set_num_threads(place.threads())  # A recipe may say otherwise.
    with joined_group(place, device) as processes:
        work(device, processes)


def _train(
    source: str,
    overrides: list[str],
    output: Path,
    resume: bool,
    tensorboard: bool,
    device: torch.device,
    processes: Processes,
) -> None:
    console = output_console(quiet=not processes.leads)
    mistake: str | None = None
    log: TensorBoardLog | None = None
    run = RunFolder(output)
    try:
        if tensorboard and processes.leads:
            log = TensorBoardLog(run.tensorboard)
        recipe = load_recipe(source, overrides)
        if processes.leads:
            run = RunFolder.opened(output, recipe.as_data(), resume=resume)
        experiment = Experiment.of(recipe)
    except (ImportError, OSError, TypeError, ValueError) as error:
        mistake = str(error)
    # The others also wait here until the first one has opened the run.
    mistake = processes.first_message(mistake)
    if mistake is not None:
        _fail_together(mistake, processes)
    text = yaml.safe_dump(recipe.as_data(), sort_keys=False, allow_unicode=True)
    console.print(text.rstrip(), markup=False)
    try:
        follow(experiment, run, device, console, processes, None if log is None else log.on_epoch)
    finally:
        if log is not None:
            log.close()
    result = experiment.evaluate(processes)
    if processes.leads:
        store_evaluation(output, as_data(experiment, result))
    print_facts(console, f"On the {len(experiment.test)} test images", rows(result))
    console.print(f"Run: {output}", soft_wrap=True)


def follow(
    experiment: Experiment,
    run: RunFolder,
    device: torch.device,
    console: Console,
    processes: Processes = ALONE,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
) -> list[EpochMetrics]:
    """Train in the run's folder, and show how it goes."""
    recipe = experiment.recipe
    together = "" if processes.count == 1 else f", by {processes.count} processes"
    console.print(
        f"{recipe.model.name} ({parameter_count(experiment.model):,} parameters) on "
        f"{experiment.data.name}: {len(experiment.training)} images to train on, on "
        f"{device.type if together else device}{together}."
    )
    display = TrainingDisplay(console, recipe.training.epochs)

    def show(metrics: EpochMetrics) -> None:
        display.on_epoch(metrics)
        if on_epoch is not None:
            on_epoch(metrics)

    try:
        with display.progress:
            return experiment.train(
                run, device, processes=processes, on_epoch=show, on_step=display.on_step
            )
    except NonFiniteError as error:
        _fail_together(str(error), processes, code=1)


def _fail_together(message: str, processes: Processes, code: int = 2) -> NoReturn:
    """End every process; all know what is wrong, and the first one says it before they end."""
    try:
        if processes.leads:
            fail(message, code)
    finally:
        processes.first_message(None)
    raise typer.Exit(code)
