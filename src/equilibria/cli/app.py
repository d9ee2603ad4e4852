"""The program, and the options that several of its commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from typer import Argument, Option
from typer.core import TyperGroup

from equilibria.cli.console import fail
from equilibria.solvers import ConvergenceError
from equilibria.training import (
    Experiment,
    NonFiniteError,
    ProcessLostError,
    choose_device,
    trained,
)

Function = TypeVar("Function", bound=Callable[..., None])

Best = Annotated[bool, Option("--best", help="With the weights of the epoch that validated best.")]
DataRoot = Annotated[
    Path | None, Option(help="Folder of data sets; what EQUILIBRIA_DATA names if not set.")
]
Device = Annotated[str, Option(help="auto, cpu, cuda or mps.")]
FinishedRun = Annotated[Path, Argument(help="Folder of a finished run.")]
JsonList = Annotated[bool, Option("--json", help="A JSON list.")]
JsonObject = Annotated[bool, Option("--json", help="One JSON object.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Of all that is drawn at random.")]

MISTAKES = (ImportError, OSError, TypeError, ValueError)
"""What a user can mend."""
FAILURES = (ConvergenceError, NonFiniteError, ProcessLostError)
"""What went wrong on the way."""


class Program(TyperGroup):
    """Commands; what a user can mend ends them with a line, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MISTAKES as error:
            fail(str(error))
        except FAILURES as error:
            fail(str(error), code=1)


app = typer.Typer(
    name="equilibria",
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def examples(*commands: str) -> str:
    """What stands below the help of a command."""
    heading = "Examples" if len(commands) > 1 else "Example"
    return "\n\n".join([f"[bold]{heading}[/bold]", *commands])


def command(
    name: str, *example_lines: str, to: typer.Typer = app, context_settings: Any = None
) -> Callable[[Function], Function]:
    """Makes a function a command of the program; its docstring is the help."""
    epilog = examples(*example_lines) if example_lines else None
    return to.command(name, epilog=epilog, context_settings=context_settings)


def opened(run: Path, device: str | torch.device, best: bool) -> Experiment:
    """The experiment of a finished run, on the device that was asked for."""
    return trained(run, device=choose_device(device), weights="best" if best else "last")
