"""`equilibria train`, `evaluate`, `recipes` and `runs`."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from equilibria.cli.console import TrainingDisplay, fail, figure_rows, print_table
from equilibria.cli.launch import run_processes
from equilibria.data import evenly_spread
from equilibria.models import parameter_count
from equilibria.report.compare import store_evaluation
from equilibria.report.segmentation import segmentation_png
from equilibria.tasks import Result, Segmentation
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
    evaluate_together,
    joined_group,
    list_recipes,
    load_recipe,
    trained,
    write_atomically,
)
from equilibria.training.tensorboard import TensorBoardLog

DRAWN_IMAGES = 4


@dataclass(frozen=True)
class TrainingRequest:
    """What `equilibria train` was asked for."""

    recipe: str
    overrides: list[str]
    output: Path
    resume: bool
    device_name: str
    tensorboard: bool = False


def run_training(request: TrainingRequest, *, devices: int = 1) -> None:
    """Train as a recipe says, alone or with others: those that torchrun started, or `devices`."""
    place = Place.from_environment()
    if place is not None:
        if devices > 1:
            fail(f"torchrun has started {place.count} processes: leave out --devices")
        if place.rank > 0:
            warnings.simplefilter("ignore")  # The first process says the same.
        try:
            train_in_group(place, request)
        except ProcessLostError as error:
            fail(str(error), code=1)
        return
    try:
        if devices == 1:
            device = choose_device(request.device_name)
        else:  # A mistake shows before the processes start.
            load_recipe(request.recipe, request.overrides)
            Place(0, devices, 0, devices).device(request.device_name)
    except (OSError, ValueError) as error:
        fail(str(error))
    if devices == 1:
        _train(request, device, ALONE)
    else:
        run_processes(devices, train_in_group, request)


def train_in_group(place: Place, request: TrainingRequest) -> None:
    """Train as one of several processes."""
    try:
        device = place.device(request.device_name)
    except ValueError as error:
        _fail_once(str(error), leads=place.rank == 0)
    torch.set_num_threads(place.threads())  # A recipe may say otherwise.
    with joined_group(place, device) as processes:
        _train(request, device, processes)


def _train(request: TrainingRequest, device: torch.device, processes: Processes) -> None:
    console = Console(highlight=False, quiet=not processes.leads)
    mistake: str | None = None
    log: TensorBoardLog | None = None
    try:
        if request.tensorboard and processes.leads:
            log = TensorBoardLog(RunFolder(request.output).tensorboard)
        chosen = load_recipe(request.recipe, request.overrides)
        run = RunFolder(request.output)
        if processes.leads:
            run = _open_run(request.output, chosen.as_data(), request.resume)
        experiment = Experiment.of(chosen)
    except (ImportError, OSError, TypeError, ValueError) as error:
        mistake = str(error)
    # The others also wait here until the first one has opened the run.
    mistake = processes.first_message(mistake)
    if mistake is not None:
        _fail_once(mistake, leads=processes.leads)
    console.print(_yaml(chosen.as_data()), markup=False)
    together = "" if processes.count == 1 else f", by {processes.count} processes"
    console.print(
        f"{chosen.model.name} ({parameter_count(experiment.model):,} parameters) on "
        f"{experiment.data.name}: {len(experiment.training)} images to train on, on "
        f"{device.type if together else device}{together}."
    )

    def on_epoch(metrics: EpochMetrics) -> None:
        display.on_epoch(metrics)
        if log is not None:
            log.on_epoch(metrics)

    try:
        with TrainingDisplay(console, chosen.training.epochs).running() as display:
            experiment.train(
                run,
                device,
                processes=processes,
                on_epoch=on_epoch,
                on_step=display.on_step,
            )
    except NonFiniteError as error:
        _fail_once(str(error), leads=processes.leads, code=1)
    finally:
        if log is not None:
            log.close()
    result = evaluate_together(experiment, processes)
    if processes.leads:
        store_evaluation(request.output, as_data(experiment, result))
    print_table(console, f"On the {len(experiment.test)} test images", _rows(result))
    console.print(f"Run: {request.output}", soft_wrap=True)


def _fail_once(message: str, *, leads: bool, code: int = 2) -> NoReturn:
    """End every process; all know what is wrong, and the first one says it."""
    if leads:
        fail(message, code)
    raise typer.Exit(code)


def run_evaluation(
    *, folder: Path, best: bool, draw: Path | None, device_name: str, as_json: bool
) -> None:
    """Evaluate a finished run on its test images."""
    try:
        device = choose_device(device_name)
        experiment = trained(folder, device=device, weights="best" if best else "last")
        if draw is not None:
            write_atomically(draw, _drawn(experiment, device))
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    result = experiment.evaluate()
    if as_json:
        print(json.dumps(as_data(experiment, result), indent=2, allow_nan=False))
        return
    title = f"{experiment.recipe.model.name} on the {len(experiment.test)} test images"
    print_table(Console(highlight=False), title, _rows(result))


@torch.no_grad()
def _drawn(experiment: Experiment, device: torch.device) -> bytes:
    """Some test images with their true classes, the predicted ones, and the errors."""
    if not isinstance(experiment.task, Segmentation):
        raise ValueError("--draw shows the classes of pixels, and this run knows none")
    chosen = evenly_spread(experiment.test, DRAWN_IMAGES)
    images, labels = experiment.data.test.fetch(chosen)
    logits = experiment.model(images.to(device))
    return segmentation_png(
        images,
        labels,
        logits.argmax(dim=1).cpu(),
        experiment.data.class_names,
        ignore_index=experiment.task.ignore_index,
    )


def as_data(experiment: Experiment, result: Result) -> dict[str, Any]:
    """The evaluation as one object."""
    return {
        "model": experiment.recipe.model.name,
        "data": experiment.data.name,
        "parameters": parameter_count(experiment.model),
        "samples": result.samples,
        **{name: value for name, value in result.figures.items() if value is not None},
        "loss": result.loss,
        "mean_iterations": result.solves.mean_iterations,
        "max_iterations": result.solves.max_iterations,
        "share_converged": result.solves.share_converged,
        "max_residual": result.solves.max_residual,
    }


def show_recipes() -> None:
    """The recipes by name."""
    table = Table(box=box.SIMPLE)
    table.add_column("Name", no_wrap=True)
    table.add_column("Epochs", justify="right")
    table.add_column("What it is")
    for name, path in list_recipes().items():
        recipe = load_recipe(path)
        table.add_row(name, str(recipe.training.epochs), recipe.about)
    Console(highlight=False).print(table)


def show_runs(folder: Path) -> None:
    """The runs in a folder, with where they stand."""
    table = Table(box=box.SIMPLE)
    for column in ("Run", "Model", "Data", "Epochs", "Loss", "Accuracy", "State"):
        table.add_column(column)
    found = sorted(path.parent for path in folder.glob("**/config.yaml"))
    for path in found:
        run = RunFolder(path)
        try:
            recipe = load_recipe(run.config)
        except ValueError:
            continue  # A run of another kind, such as that of the demonstration.
        metrics = run.read_metrics()
        last = metrics[-1] if metrics else None
        table.add_row(
            str(path),
            recipe.model.name,
            recipe.data.name,
            f"{len(metrics)}/{recipe.training.epochs}",
            "" if last is None else f"{last['loss']:.4f}",
            "" if last is None or last["accuracy"] is None else f"{last['accuracy']:.2%}",
            "finished" if run.weights.exists() else "interrupted",
        )
    Console(highlight=False).print(table)


def _open_run(output: Path, config: dict[str, Any], resume: bool) -> RunFolder:
    if not resume or not (output / "config.yaml").exists():
        return RunFolder.create(output, config)
    run = RunFolder(output)
    if load_recipe(run.config).as_data() != config:
        raise ValueError(
            f"{run.config} is another recipe than the one given: resume with that recipe "
            f"(equilibria train {run.config} --output {output} --resume), or name a new folder"
        )
    return run


def _rows(result: Result) -> list[tuple[str, str]]:
    rows = figure_rows(result.figures, correct=getattr(result, "correct", None), of=result.samples)
    rows.append(("Loss", f"{result.loss:.4f}"))
    solves = result.solves
    if solves.mean_iterations is not None and solves.share_converged is not None:
        rows.append(("Iterations, mean", f"{solves.mean_iterations:.1f}"))
        rows.append(("Share converged", f"{solves.share_converged:.1%}"))
    return rows


def _yaml(data: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True)).rstrip()
