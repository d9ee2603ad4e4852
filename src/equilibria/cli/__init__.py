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
"""In the order of `equilibria --help`; each module adds its command to the program."""
for _name in COMMANDS:
    import_module(f"equilibria.cli.{_name.replace('-', '_')}")
app.registered_commands.sort(key=lambda command: COMMANDS.index(str(command.name)))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"equilibria {__version__}")
        raise typer.Exit


START = """\
Networks whose output is the minimizer of an explicit hidden objective. Three commands to try:

  equilibria demo                     train a small one on digits, and look at its report
  equilibria models --pretrained      trained models that come with the program
  equilibria certify --model digits-certified
                                      what is proven of one's answers to test images

equilibria --help lists all commands, and each has examples: equilibria train --help
"""
"""What `equilibria` alone says."""


@app.callback(epilog=examples(*EXAMPLES, "equilibria models"))
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE|MODULE",
            help="Your own parts: code that registers models, tasks, data sets, …; also after a "
            "command, and several times.",
        ),
    ] = None,
    max_gigabytes: Annotated[
        float | None,
        typer.Option(
            "--max-gigabytes",
            metavar="N",
            help="Memory that the model of a run may need for its parameters and one image; 10 if "
            "not set. Also after a command.",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; after a command too.")
    ] = False,
) -> None:
    """Networks whose output is the minimizer of an explicit hidden objective."""
    if context.invoked_subcommand is None:
        typer.echo(START, nl=False)


def main() -> None:
    """The entry point of the `equilibria` program."""
    warnings.showwarning = warn
    keep_freed_memory()
    app()
