"""The program, and the options that several of its commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Function = TypeVar("Function", bound=Callable[..., None])

Best = Annotated[
    bool, typer.Option("--best", help="With the weights of the epoch that validated best.")
]
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder of data sets; what EQUILIBRIA_DATA names if not set.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
FinishedRun = Annotated[Path, typer.Argument(help="Folder of a finished run.")]
JsonList = Annotated[bool, typer.Option("--json", help="A JSON list.")]
JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
MAX_SEED = 2**32 - 1

app = typer.Typer(
    name="equilibria",
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
    name: str, *example_lines: str, context_settings: dict[str, Any] | None = None
) -> Callable[[Function], Function]:
    """Makes a function a command of the program; its docstring is the help."""
    epilog = examples(*example_lines) if example_lines else None
    return app.command(name, epilog=epilog, context_settings=context_settings)
