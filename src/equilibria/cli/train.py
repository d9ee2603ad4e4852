"""`equilibria train`: a model as a recipe says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Argument, Option

import equilibria as eq
from equilibria.cli import faults
from equilibria.cli.app import DataRoot, Device, Overwrite, command, page_footer
from equilibria.cli.console import output_console, print_facts, print_json
from equilibria.cli.evaluate import as_data, rows
from equilibria.cli.faults import (
    FAILURES,
    INTERRUPTED,
    MISTAKES,
    FaultError,
    complain,
    printable,
    sentence,
    unanswered,
)
from equilibria.cli.processes import agreed, launch, work_in_group
from equilibria.cli.progress import follow, keeping, what_is_kept

if TYPE_CHECKING:
    import torch


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
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        overrides, recipe = [recipe, *(overrides or [])], None  # A change, of the run's own recipe.
    if root is not None:
        overrides = [*(overrides or []), f"data.root={json.dumps(str(root))}"]
    options = TrainOptions(
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
    work = partial(_train, options)
    place = eq.training.distributed.Place.from_environment()
    if place is not None:
        if devices > 1:
            raise ValueError(f"torchrun has started {place.count} processes: leave out --devices")
        work_in_group(place, device, work)
    elif devices == 1:
        work(eq.training.processes.choose_device(device), eq.training.processes.ALONE)
    else:
        # A mistake shows before the processes start.
        options.plan()
        eq.training.distributed.Place(0, devices, 0, devices).device(device)
        launch(devices, work_in_group, device, work)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of `equilibria train` that every process needs."""

    recipe: str | None
    overrides: list[str]
    output: Path
    resume: bool
    overwrite: bool
    epochs: str | None
    start_from: Path | None
    tensorboard: bool
    report: bool
    as_json: bool = False

    def plan(self) -> eq.training.planning.RunPlan:
        return eq.training.planning.plan_run(
            self.recipe,
            self.overrides,
            self.output,
            resume=self.resume,
            overwrite=self.overwrite,
            epochs=self.epochs,
        )


def _train(
    options: TrainOptions, device: torch.device, processes: eq.training.processes.Processes
) -> None:
    """Train and evaluate a run, as the only process or as one of several."""
    with eq.training.processes.denormals_as_zero():
        _train_and_evaluate(options, device, processes)


def _train_and_evaluate(
    options: TrainOptions, device: torch.device, processes: eq.training.processes.Processes
) -> None:
    from equilibria.report.compare import store_evaluation
    from equilibria.training.own_images import is_own_images
    from equilibria.training.progress import notes

    console = output_console(quiet=not processes.leads)
    if options.as_json:
        console = Console(stderr=True, highlight=False, quiet=not processes.leads)
    log: eq.training.metrics.TensorBoardLog | None = None
    run = eq.training.RunFolder(options.output)
    try:
        with agreed(processes):
            plan = options.plan()
        # All have read what the folder says before the first one writes there.
        with agreed(processes):
            if options.tensorboard and processes.leads:
                log = eq.training.metrics.TensorBoardLog(run.tensorboard)
            experiment = eq.training.experiment.Experiment.of(plan.recipe)
            if processes.leads:
                run = eq.training.planning.open_run(
                    plan,
                    experiment,
                    options.output,
                    overwrite=options.overwrite,
                    start_from=options.start_from,
                )
    except BaseException as end:
        run.abandon()
        if isinstance(end, KeyboardInterrupt) and processes.leads:
            raise FaultError(f"interrupted: {what_is_kept(run)}", INTERRUPTED) from None
        raise
    with keeping(run, processes):
        lines = notes(plan, run)
        if options.recipe is not None and is_own_images(options.recipe):
            lines.append(plan.recipe.about)
        for line in lines:
            console.print(printable(line), markup=False, soft_wrap=True)
        try:
            on_epoch = None if log is None else log.on_epoch
            follow(experiment, run, device, console, processes, on_epoch)
        finally:
            if log is not None:
                log.close()
        result = experiment.evaluate(processes)
        if processes.leads:
            store_evaluation(options.output, as_data(experiment, result))
    if options.as_json and processes.leads:
        print_json({"run": str(options.output), **as_data(experiment, result)})
    print_facts(f"On the {result.samples} test images", rows(result), console)
    console.print(printable(_left_out(experiment)), markup=False, soft_wrap=True, end="")
    console.print(printable(f"Run: {options.output}"), markup=False, soft_wrap=True)
    if processes.leads:
        if options.report:
            _report(options.output, experiment, result, console)
        unit = f"{experiment.task.unit}s"
        complain(unanswered(result.figures.get("unanswered"), result.samples, unit))


def _report(
    folder: Path,
    experiment: eq.training.experiment.Experiment,
    result: eq.tasks.Evaluation,
    console: Console,
) -> None:
    """Write the report of the run; a failure is a warning and leaves the run unchanged."""
    try:
        page = eq.report.write_report(folder, experiment, result, page_footer(experiment))
    except (*MISTAKES, *FAILURES) as error:
        faults.show_traceback()
        faults.warn(f"the report could not be written: {sentence(error)}")
    else:
        console.print(printable(f"Report: {page}"), markup=False, soft_wrap=True)


def _left_out(experiment: eq.training.experiment.Experiment) -> str:
    """Count the images that could not be read, if warnings have not named all of them."""
    from equilibria.data.batches import MAX_WARNINGS

    count = len(experiment.unreadable())
    if count <= MAX_WARNINGS:
        return ""
    return f"{count} images could not be read and are left out; the first ones are named above.\n"
