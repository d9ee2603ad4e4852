"""The program, and what several commands share: options, opening a run, the footer of a page."""

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

Best = Annotated[bool, Option("--best", help="With the weights of the epoch that validated best.")]
Certified = Annotated[
    bool, Option("--certified", help="Solve each image only until its class is certain.")
]
Classifier = Annotated[
    Path, Argument(help="Run of a classifier, or --model NAME: `equilibria models --pretrained`.")
]
DataRoot = Annotated[
    Path | None, Option(help="Folder of data sets; what EQUILIBRIA_DATA names if not set.")
]
Device = Annotated[str, Option(help="auto, cpu, cuda or mps.")]
ImagesOrTests = Annotated[
    list[Path] | None,
    Argument(help="Image files, or folders of them; test images of the run if not given."),
]
JsonList = Annotated[bool, Option("--json", help="A JSON list.")]
JsonObject = Annotated[bool, Option("--json", help="One JSON object.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the run that the folder holds.")]
OverwriteFiles = Annotated[bool, Option("--overwrite", help="Replace files that are there.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Of all that is drawn at random.")]
SomeRun = Annotated[
    Path, Argument(help="Folder of a run, or --model NAME: `equilibria models --pretrained`.")
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
"""Commands that take a trained model of the package in the place of a run."""

TAKE_A_VALUE = {"--import": "a file or a module", "--max-gigabytes": "a number"}
"""Options of the program with a value, which also stand behind a command."""


class Program(TyperGroup):
    """Commands; a fault ends them with a sentence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options of the program are understood behind the command too, where one adds them to a
        # line that failed.
        own: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word.split("=")[0] == "--model" and others[:1] and others[0] in TAKE_A_MODEL:
                # A trained model by name stands where the folder of a run does.
                given = word.partition("=")[2] or next(words, None)
                others.insert(1, given or ctx.fail("--model needs the name of a trained model"))
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
        with faults.told():
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
    """What stands below the help of a command."""
    heading = "Examples" if len(commands) > 1 else "Example"
    return "\n\n".join([f"[bold]{heading}[/bold]", *commands])


def command(
    name: str, *example_lines: str, to: typer.Typer = app, context_settings: Any = None
) -> Callable[[Function], Function]:
    """Makes a function a command of the program; its docstring is the help."""
    epilog = examples(*example_lines) if example_lines else None
    return to.command(name, epilog=epilog, context_settings=context_settings)


def opened(
    run: Path, device: torch.device, best: bool, root: Path | None
) -> eq.training.experiment.Experiment:
    """The experiment of a run, with its data."""
    return eq.training.experiment.trained(
        run, device=device, weights="best" if best else "last", root=root
    )


def opened_model(run: Path, device: torch.device, best: bool) -> eq.training.experiment.RecipeModel:
    """The model of a run, which needs no data."""
    return eq.training.experiment.trained_model(
        run, device=device, weights="best" if best else "last"
    )


def page_footer(run: eq.training.experiment.RecipeModel) -> str:
    """Return the last line of an HTML page about a run: the versions and the seed behind it."""
    import torch

    seed = run.recipe.training.seed
    return f"equilibria {eq.__version__} · torch {torch.__version__} · seed {seed}"
