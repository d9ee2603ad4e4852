"""The program, and shared parts of commands: options, opening runs, footers of pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Argument, Option
from typer.core import TyperGroup

import equilibria as eq
from equilibria.cli import faults
from equilibria.plugins import import_parts

if TYPE_CHECKING:
    import torch

Function = TypeVar("Function", bound=Callable[..., None])

Best = Annotated[
    bool, Option("--best", help="Use the weights of the epoch with the best validation score.")
]
Certified = Annotated[
    bool, Option("--certified", help="Solve each image only until its class is certified.")
]
Classifier = Annotated[
    Path,
    Argument(
        help="Folder of a classifier's run, or --model NAME (see `equilibria models --pretrained`)."
    ),
]
DataRoot = Annotated[
    Path | None, Option(help="Folder of data sets (default: environment variable EQUILIBRIA_DATA).")
]
Device = Annotated[str, Option(help="Device: auto, cpu, cuda or mps.")]
ImagesOrTests = Annotated[
    list[Path] | None,
    Argument(help="Image files, or folders of them (default: test images of the run)."),
]
JsonList = Annotated[bool, Option("--json", help="Print a JSON list.")]
JsonObject = Annotated[bool, Option("--json", help="Print a JSON object.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the run in the output folder.")]
OverwriteFiles = Annotated[bool, Option("--overwrite", help="Replace files that exist.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of all random numbers.")]
SomeRun = Annotated[
    Path,
    Argument(help="Folder of a run, or --model NAME (see `equilibria models --pretrained`)."),
]
TAKE_A_MODEL = {
    "predict",
    "evaluate",
    "certify",
    "explain",
    "attack",
    "generate",
    "restore-run",
    "export",
    "serve",
    "explore",
}
"""Commands that accept a pretrained model (--model NAME) instead of a run."""

TAKE_A_VALUE = {"--import": "a file or a module", "--max-gigabytes": "a number"}
"""Options of the program that have a value and can follow the command."""


class Program(TyperGroup):
    """Group of commands that reports errors as one sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Users add --debug to the end of a line that failed, so options of the program can also
        # follow the command.
        own: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word.split("=")[0] == "--model" and others[:1] and others[0] in TAKE_A_MODEL:
                # The name of a pretrained model replaces the folder of a run.
                given = word.partition("=")[2] or next(words, None)
                others.insert(1, given or ctx.fail("--model needs the name of a pretrained model"))
                continue
            if word in TAKE_A_VALUE:
                own += [word, next(words, None) or ctx.fail(f"{word} needs {TAKE_A_VALUE[word]}")]
            elif word == "--debug" or word.partition("=")[0] in TAKE_A_VALUE:
                own.append(word)
            else:
                others.append(word)
        return super().parse_args(ctx, own + others)

    def invoke(self, ctx: Any) -> Any:
        faults.debug = ctx.params["debug"]
        with faults.reported_errors():
            import_parts(ctx.params["imports"] or ())
            gigabytes = ctx.params["max_gigabytes"]
            if gigabytes is None:
                return super().invoke(ctx)
            with eq.training.size_limit(gigabytes):
                return super().invoke(ctx)


app = typer.Typer(
    name="equilibria",
    cls=Program,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def examples(*commands: str) -> str:
    """Return the examples below the help of a command."""
    heading = "Examples" if len(commands) > 1 else "Example"
    return "\n\n".join([f"[bold]{heading}[/bold]", *commands])


def command(
    name: str, *example_lines: str, to: typer.Typer = app, context_settings: Any = None
) -> Callable[[Function], Function]:
    """Return a decorator that makes a function a command; its docstring is the help."""
    epilog = examples(*example_lines) if example_lines else None
    return to.command(name, epilog=epilog, context_settings=context_settings)


def opened(
    run: Path, device: torch.device, best: bool, root: Path | None
) -> eq.training.experiment.Experiment:
    """Open the trained model of a run with its data."""
    return eq.training.experiment.trained(
        run, device=device, weights="best" if best else "last", root=root
    )


def opened_model(run: Path, device: torch.device, best: bool) -> eq.training.experiment.RecipeModel:
    """Open the trained model of a run without its data."""
    return eq.training.experiment.trained_model(
        run, device=device, weights="best" if best else "last"
    )


def page_footer(run: eq.training.experiment.RecipeModel) -> str:
    """Return the last line of an HTML page about a run: the versions and the seed behind it."""
    import torch

    seed = run.recipe.training.seed
    return f"equilibria {eq.__version__} · torch {torch.__version__} · seed {seed}"
