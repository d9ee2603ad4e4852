"""The command line, one file per command: each parses options, calls the library and prints."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Annotated

import typer

from equilibria import __version__
from equilibria.cli.allocator import keep_freed_memory
from equilibria.cli.app import app, examples
from equilibria.cli.demo import EXAMPLES
from equilibria.cli.faults import warn

__all__ = ["app", "main"]

COMMANDS = (
    *("demo", "models", "train", "evaluate", "predict", "certify", "explain", "attack"),
    *(
        "generate",
        "restore",
        "restore-run",
        "datasets",
        "recipes",
        "runs",
        "report",
        "compare",
        "reproduce",
    ),
    *("tune", "export", "explore", "serve", "bench"),
)
"""Commands in the order of `equilibria --help`; each module adds its command to the program."""
for _name in COMMANDS:
    import_module(f"equilibria.cli.{_name.replace('-', '_')}")
app.registered_commands.sort(key=lambda command: COMMANDS.index(str(command.name)))


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"equilibria {__version__}")
        raise typer.Exit


START = """\
Networks whose output is the minimizer of an explicit hidden objective. Three commands to try:

  equilibria demo                     train a small network on digits and write a report
  equilibria models --pretrained      list the pretrained models
  equilibria certify --model digits-certified
                                      certify the predictions of one of them

equilibria --help lists all commands. Each command has examples: equilibria train --help
"""
"""Output of `equilibria` without a command."""


@app.callback(epilog=examples(*EXAMPLES, "equilibria models"))
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE|MODULE",
            help="Code that registers custom models, tasks, data sets, …. Can be repeated, and "
            "can follow the command.",
        ),
    ] = None,
    max_gigabytes: Annotated[
        float | None,
        typer.Option(
            "--max-gigabytes",
            metavar="N",
            help="Largest memory that the model of a run may need for its parameters and one "
            "image, in GB (default: 10). Can follow the command.",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of errors. Can follow the command.")
    ] = False,
) -> None:
    """Networks whose output is the minimizer of an explicit hidden objective."""
    if context.invoked_subcommand is None:
        typer.echo(START, nl=False)


def main() -> None:
    """Run the `equilibria` program."""
    warnings.showwarning = warn
    keep_freed_memory()
    app()
