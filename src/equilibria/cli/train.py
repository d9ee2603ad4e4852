"""`equilibria train`: train a model with a recipe or on images."""

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
    sentence,
    unanswered,
)
from equilibria.cli.processes import agreed, launch, work_in_group
from equilibria.cli.progress import follow, keeping, what_is_kept
from equilibria.registry import printable

if TYPE_CHECKING:
    import torch


@command(
    "train",
    "equilibria train digits-opteq --output runs/opteq",
    "equilibria train photos/ --output runs/photos",
    "equilibria train photos/ --certified --output runs/certified",
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
            help="YAML file, or name of a recipe (see `equilibria recipes`). Or images, for which "
            "a recipe is chosen: a folder with one subfolder per class, or a CSV file of files "
            "and labels. With --resume, the default is the recipe of the run.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        Argument(metavar="KEY=VALUE...", help="Changes to the recipe, such as training.epochs=5."),
    ] = None,
    certified: Annotated[
        bool,
        Option(
            "--certified",
            help="Train a network with certified radii on a folder or table of images, and report "
            "certified accuracy on held-out images.",
        ),
    ] = False,
    output: Annotated[Path, Option(help="Folder of the run.")] = Path("equilibria-run"),
    resume: Annotated[
        bool,
        Option(help="Continue from the last checkpoint in the output folder, if there is one."),
    ] = False,
    epochs: Annotated[
        str | None,
        Option(
            metavar="N|+N",
            help="Total number of epochs; +5 continues the run in the output folder for 5 more.",
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
        int, Option(min=1, help="Number of processes that share each batch, one per GPU.")
    ] = 1,
    tensorboard: Annotated[
        bool,
        Option(
            "--tensorboard",
            help="Also write TensorBoard logs to the folder `tensorboard` of the run.",
        ),
    ] = False,
    report: Annotated[
        bool, Option(help="Write report.html to the folder of the run, in a few seconds.")
    ] = True,
    as_json: Annotated[
        bool,
        Option("--json", help="Print the evaluation as a JSON object, and all else to stderr."),
    ] = False,
) -> None:
    """Train a model with a recipe, or on a folder or table of images."""
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        # Without a recipe, the first argument is a change to the recipe of the run.
        overrides, recipe = [recipe, *(overrides or [])], None
    if certified:
        overrides = [*_certified(recipe), *(overrides or [])]
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
            raise ValueError(f"torchrun has started {place.count} processes; remove --devices")
        work_in_group(place, device, work)
    elif devices == 1:
        work(eq.training.processes.choose_device(device), eq.training.processes.ALONE)
    else:
        # Report errors in the arguments before the processes start.
        options.plan()
        eq.training.distributed.Place(0, devices, 0, devices).device(device)
        launch(devices, work_in_group, device, work)


def _certified(source: str | None) -> list[str]:
    """Return the change of a recipe for images that makes the network certified."""
    from equilibria.training.own_images import is_own_images

    if source is None or not is_own_images(source):
        certified = [name for name in eq.training.list_recipes() if name.endswith("-certified")]
        raise ValueError(
            "--certified chooses a network for images: give a folder with one subfolder per class, "
            f"or a table of files. Recipes with certificates: {', '.join(certified)}"
        )
    return ["task.name=certified"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `equilibria train` that every process needs."""

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
        """Return the recipe and the starting point of the run."""
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
    from equilibria.analysis.compare import store_evaluation
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
        # All processes have read the folder before the first one writes to it.
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
    console.print(printable(_unreadable_note(experiment)), markup=False, soft_wrap=True, end="")
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
    """Write the report of the run; a failure is only a warning."""
    from equilibria.analysis.stored import stored_history

    try:
        findings = eq.analysis.measure_run(
            experiment,
            stored_history(eq.training.RunFolder(folder)),
            name=str(folder),
            evaluation=result,
        )
        page = eq.report.write_report(folder, findings, page_footer(experiment))
    except (*MISTAKES, *FAILURES) as error:
        faults.show_traceback()
        faults.warn(f"the report could not be written: {sentence(error)}")
    else:
        console.print(printable(f"Report: {page}"), markup=False, soft_wrap=True)


def _unreadable_note(experiment: eq.training.experiment.Experiment) -> str:
    """Return the number of unreadable images as a line, unless warnings have named all of them."""
    from equilibria.data.batches import MAX_WARNINGS

    count = len(experiment.unreadable())
    if count <= MAX_WARNINGS:
        return ""
    return f"{count} images could not be read and were skipped; warnings name the first ones.\n"
