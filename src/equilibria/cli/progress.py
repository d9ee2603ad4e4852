"""Progress of a training in the terminal, and advice if the training ends early."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

import equilibria as eq
from equilibria import plugins
from equilibria.cli.faults import FAILURES, INTERRUPTED, MISTAKES, FaultError, sentence
from equilibria.cli.processes import fail_together
from equilibria.registry import printable

if TYPE_CHECKING:
    import torch


def follow(
    experiment: eq.training.experiment.Experiment,
    run: eq.training.RunFolder,
    device: torch.device,
    console: Console,
    processes: eq.training.processes.Processes,
    on_epoch: Callable[[eq.training.EpochMetrics], None] | None = None,
) -> list[eq.training.EpochMetrics]:
    """Train the model of a run, and print a summary of the run and the progress."""
    from equilibria.training.progress import TrainingDisplay, both, summary

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
    except eq.training.NonFiniteError as error:
        fail_together(str(error), processes, code=1)


@contextmanager
def keeping(
    run: eq.training.RunFolder, processes: eq.training.processes.Processes
) -> Iterator[None]:
    """Extend the message of errors in this block by what is stored of the run.

    It also says how to continue the run.
    """
    try:
        yield
    except (typer.Exit, eq.training.ProcessLostError):
        raise
    except KeyboardInterrupt:
        if not processes.leads:
            raise typer.Exit(INTERRUPTED) from None
        raise FaultError(f"interrupted: {what_is_kept(run)}", INTERRUPTED) from None
    except (*MISTAKES, *FAILURES) as error:
        raise FaultError(f"{sentence(error)}; {what_is_kept(run)}") from error


def what_is_kept(run: eq.training.RunFolder) -> str:
    """Describe what is stored of a run, and the command that uses it."""
    imports = [word for parts in plugins.imported() for word in ("--import", parts.source)]
    if run.is_finished():
        words = ["equilibria", "evaluate", str(run.path), *imports]
        return f"the trained model is stored; evaluate it with: {shlex.join(words)}"
    newest = next(iter(eq.training.checkpoints.Checkpoints(run.checkpoints).present()), None)
    resume = shlex.join(["equilibria", "train", "--resume", "--output", str(run.path), *imports])
    if newest is not None:
        return f"the checkpoint {newest.name} is stored; continue with: {resume}"
    if run.is_run():  # A previous training of the same run ended in its first epoch.
        return f"no epoch was finished; start again with: {resume}"
    return "no epoch was finished, and nothing is stored"
