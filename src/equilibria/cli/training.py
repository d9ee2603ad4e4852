"""Training as the terminal sees it, by one process or several."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

from equilibria import plugins
from equilibria.cli import faults
from equilibria.cli.app import page_footer
from equilibria.cli.console import output_console, print_facts, print_json
from equilibria.cli.evaluate import as_data, rows
from equilibria.cli.faults import (
    FAILURES,
    INTERRUPTED,
    MISTAKES,
    FaultError,
    complain,
    fail,
    printable,
    sentence,
    unanswered,
)
from equilibria.data.batches import NAMED_PROBLEMS
from equilibria.data.workers import end_with_parent
from equilibria.report import store_evaluation, write_report
from equilibria.tasks import Evaluation
from equilibria.training import (
    ALONE,
    Checkpoints,
    EpochMetrics,
    Experiment,
    NonFiniteError,
    Place,
    Plan,
    Processes,
    ProcessLostError,
    RunFolder,
    denormals_as_zero,
    joined_group,
    open_run,
    plan_run,
)
from equilibria.training.metrics import TensorBoardLog
from equilibria.training.own_images import is_own_images
from equilibria.training.progress import TrainingDisplay, both, notes, summary
from equilibria.training.sizes import present_limit, size_limit

Work = Callable[[torch.device, Processes], None]

PATIENCE = 10.0
"""Seconds that a process which lost the others waits to be ended with them."""


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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user wants to be trained."""

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

    def plan(self) -> Plan:
        return plan_run(
            self.recipe,
            self.overrides,
            self.output,
            resume=self.resume,
            overwrite=self.overwrite,
            epochs=self.epochs,
        )


@denormals_as_zero()
def train_as_asked(asked: Asked, device: torch.device, processes: Processes) -> None:
    console = output_console(quiet=not processes.leads)
    if asked.as_json:
        console = Console(stderr=True, highlight=False, quiet=not processes.leads)
    log: TensorBoardLog | None = None
    run = RunFolder(asked.output)
    try:
        with _agreed(processes):
            plan = asked.plan()
        # All have read what the folder says before the first one writes there.
        with _agreed(processes):
            if asked.tensorboard and processes.leads:
                log = TensorBoardLog(run.tensorboard)
            experiment = Experiment.of(plan.recipe)
            if processes.leads:
                run = open_run(
                    plan,
                    experiment,
                    asked.output,
                    overwrite=asked.overwrite,
                    start_from=asked.start_from,
                )
    except BaseException as end:
        run.abandon()
        if isinstance(end, KeyboardInterrupt) and processes.leads:
            raise FaultError(f"interrupted: {_kept(run)}", INTERRUPTED) from None
        raise
    with keeping(run, processes):
        lines = notes(plan, run)
        if asked.recipe is not None and is_own_images(asked.recipe):
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
            store_evaluation(asked.output, as_data(experiment, result))
    if asked.as_json and processes.leads:
        print_json({"run": str(asked.output), **as_data(experiment, result)})
    print_facts(f"On the {result.samples} test images", rows(result), console)
    console.print(printable(_left_out(experiment)), markup=False, soft_wrap=True, end="")
    console.print(printable(f"Run: {asked.output}"), markup=False, soft_wrap=True)
    if processes.leads:
        if asked.report:
            _report(asked.output, experiment, result, console)
        unit = f"{experiment.task.unit}s"
        complain(unanswered(result.figures.get("unanswered"), result.samples, unit))


def _report(folder: Path, experiment: Experiment, result: Evaluation, console: Console) -> None:
    """Write the page of the run; if that fails, the run is what it was."""
    try:
        page = write_report(folder, experiment, result, page_footer(experiment))
    except (*MISTAKES, *FAILURES) as error:
        faults.show_traceback()
        faults.warn(f"the report could not be written: {sentence(error)}")
    else:
        console.print(printable(f"Report: {page}"), markup=False, soft_wrap=True)


def _left_out(experiment: Experiment) -> str:
    """Count the images that could not be read, if warnings have not named all of them."""
    count = len(experiment.unreadable())
    if count <= NAMED_PROBLEMS:
        return ""
    return f"{count} images could not be read and are left out; the first ones are named above.\n"


@contextmanager
def _agreed(processes: Processes) -> Iterator[None]:
    """Around what every process does for itself: they go on together, or a mistake ends all."""
    mistake: str | None = None
    try:
        yield
    except MISTAKES as error:
        faults.show_traceback()
        mistake = sentence(error)
    mistake = processes.first_message(mistake)
    if mistake is not None:
        _fail_together(mistake, processes)


def follow(
    experiment: Experiment,
    run: RunFolder,
    device: torch.device,
    console: Console,
    processes: Processes = ALONE,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
) -> list[EpochMetrics]:
    """Train in the run's folder; print a summary of the run, and its progress."""
    lines = summary(experiment, run, device, processes)
    console.print(printable("\n".join(lines)), markup=False, soft_wrap=True)
    display = TrainingDisplay(console, experiment.recipe.training.epochs)

    try:
        with display.progress:
            return experiment.train(
                run,
                device,
                processes=processes,
                on_epoch=both(display.on_epoch, on_epoch),
                on_step=display.on_step,
                on_read=display.on_read,
            )
    except NonFiniteError as error:
        _fail_together(str(error), processes, code=1)


@contextmanager
def keeping(run: RunFolder, processes: Processes = ALONE) -> Iterator[None]:
    """Around a training: what ends it early is told with what is kept, and how to go on."""
    try:
        yield
    except (typer.Exit, ProcessLostError):
        raise
    except KeyboardInterrupt:
        if not processes.leads:
            raise typer.Exit(INTERRUPTED) from None
        raise FaultError(f"interrupted: {_kept(run)}", INTERRUPTED) from None
    except (*MISTAKES, *FAILURES) as error:
        raise FaultError(f"{sentence(error)}; {_kept(run)}") from error


def _kept(run: RunFolder) -> str:
    """What there is of a run, and the command that uses it."""
    imports = [word for parts in plugins.imported() for word in ("--import", parts.source)]
    if run.is_finished():
        words = ["equilibria", "evaluate", str(run.path), *imports]
        return f"the trained model is kept: {shlex.join(words)}"
    newest = next(iter(Checkpoints(run.checkpoints).present()), None)
    resume = shlex.join(["equilibria", "train", "--resume", "--output", str(run.path), *imports])
    if newest is not None:
        return f"the checkpoint {newest.name} is kept, go on with: {resume}"
    if run.is_run():  # It was ended at the same point before.
        return f"no epoch was finished, start again with: {resume}"
    return "no epoch was finished, and nothing is kept"


def _fail_together(message: str, processes: Processes, code: int = 2) -> NoReturn:
    """End every process; all know what is wrong, and the first one says it before they end."""
    try:
        if processes.leads:
            fail(message, code)
    finally:
        processes.first_message(None)
    raise typer.Exit(code)


def launch(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(place, *arguments)` in `count` processes; if one fails, all end, and so do we.

    `work` is a function of a module, and prints what goes wrong itself. The processes meet by a
    file and talk over the loopback device: nothing listens on the network.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # The launcher logs every failure, which `work` has told.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="equilibria-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="equilibria",
            max_restarts=0,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            meeting_point = Path(folder) / "meeting-point"
            sources = [parts.source for parts in plugins.imported()]
            elastic_launch(config, _process)(
                meeting_point, faults.debug, sources, present_limit(), work, arguments
            )
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
        except SignalException as error:
            fail(f"ended by {error.sigval.name}: --resume goes on from the last checkpoint", 130)
        else:
            return
    if failure.exitcode < 0:
        fail(
            f"process {rank + 1} of {count} was ended by {signal.Signals(-failure.exitcode).name} "
            "(is there enough memory?): --resume goes on from the last checkpoint",
            code=1,
        )
    raise typer.Exit(failure.exitcode)


def _process(
    meeting_point: Path,
    debug: bool,
    sources: Sequence[str],
    gigabytes: float,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    end_with_parent()
    faults.debug = debug
    warnings.showwarning = faults.warn
    place = Place.from_environment(meeting_point=meeting_point)
    assert place is not None
    try:
        with faults.told(), size_limit(gigabytes):
            try:
                plugins.import_parts(sources)
                work(place, *arguments)
            except ProcessLostError:
                # Ended with the others, this process leaves it to the one that failed to say why.
                time.sleep(PATIENCE)
                raise
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None  # The launcher says it.
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
