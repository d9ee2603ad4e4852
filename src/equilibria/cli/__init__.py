"""The command line: parses, calls, prints. Commands import what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equilibria.cli.annotations import Best, Device
from equilibria.cli.input_commands import add_input_commands

DEMO_EPOCHS = 40
DEMO_EXAMPLES = """[bold]Examples[/bold]

equilibria demo

equilibria demo --model deep-opteq-small --output runs/deep

equilibria demo --epochs 5 --seed 1 --device cpu"""

app = typer.Typer(
    name="equilibria",
    help="Networks whose output is the minimizer of an explicit hidden objective.",
    epilog=DEMO_EXAMPLES + "\n\nequilibria models",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from equilibria import __version__

        typer.echo(f"equilibria {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """What every command takes."""


@app.command("demo", epilog=DEMO_EXAMPLES)
def demo_command(
    output: Annotated[
        Path, typer.Option(help="Folder for the run: report, weights, metrics, configuration.")
    ] = Path("equilibria-demo"),
    model: Annotated[
        str, typer.Option(help="Name of the model; `equilibria models` lists them.")
    ] = "opteq-small",
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the training images.")
    ] = DEMO_EPOCHS,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the initial weights and the training.")
    ] = 0,
    device: Device = "auto",
) -> None:
    """Train a small equilibrium network on handwritten digits and write a report."""
    from equilibria.cli.demo import run_demo

    run_demo(output=output, model_name=model, epochs=epochs, seed=seed, device_name=device)


@app.command(
    "models",
    epilog="[bold]Examples[/bold]\n\nequilibria models\n\nequilibria models mopteq-small",
)
def models_command(
    name: Annotated[
        str | None, typer.Argument(help="A model, to see its parts and its hidden objective.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="The list as a Markdown table.")] = False,
) -> None:
    """List the models that can be made by name, or show one of them."""
    from equilibria.cli.console import fail
    from equilibria.cli.models import markdown_table, show_model, show_models

    if markdown:
        print(markdown_table())
        return
    if name is None:
        show_models()
        return
    try:
        show_model(name)
    except ValueError as error:
        fail(str(error))


@app.command(
    "train",
    epilog="[bold]Examples[/bold]\n\nequilibria train digits-opteq --output runs/opteq\n\n"
    "equilibria train digits-opteq training.epochs=3 training.seed=1 --output runs/short\n\n"
    "equilibria train recipes/digits-mopteq.yaml --output runs/mopteq --resume\n\n"
    "equilibria train digits-opteq --devices 2\n\n"
    "torchrun --nproc_per_node=2 -m equilibria train digits-opteq",
)
def train_command(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a name: `equilibria recipes`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Changes to the recipe.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("equilibria-run"),
    resume: Annotated[
        bool, typer.Option(help="Go on from the last checkpoint in the folder, if there is one.")
    ] = False,
    device: Device = "auto",
    devices: Annotated[
        int, typer.Option(min=1, help="Processes that share every batch, each with its own GPU.")
    ] = 1,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log to the folder `tensorboard` of the run too.")
    ] = False,
) -> None:
    """Train a model as a recipe says."""
    from equilibria.cli.train import TrainingRequest, run_training

    request = TrainingRequest(recipe, list(overrides or ()), output, resume, device, tensorboard)
    run_training(request, devices=devices)


@app.command(
    "evaluate",
    epilog="[bold]Examples[/bold]\n\nequilibria evaluate runs/opteq --json\n\n"
    "equilibria evaluate runs/opteq --best",
)
def evaluate_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    best: Best = False,
    draw: Annotated[
        Path | None, typer.Option(help="PNG of test images with classes, if the run segments.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: Device = "auto",
) -> None:
    """Evaluate a trained model on its test images."""
    from equilibria.cli.train import run_evaluation

    run_evaluation(folder=run, best=best, draw=draw, device_name=device, as_json=as_json)


@app.command(
    "predict",
    epilog="[bold]Examples[/bold]\n\nequilibria predict runs/opteq digit.png\n\n"
    "equilibria predict runs/opteq folder-of-images --json\n\n"
    "equilibria predict runs/camvid street.png --output drawn",
)
def predict_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the pictures, if the run segments images.")
    ] = Path("equilibria-predictions"),
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    device: Device = "auto",
) -> None:
    """Classify image files, or their pixels, with a trained model."""
    from equilibria.cli.predict import run_prediction

    run_prediction(
        folder=run,
        images=images,
        output=output,
        best=best,
        device_name=device,
        as_json=as_json,
    )


add_input_commands(app)

datasets_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.add_typer(datasets_app, name="datasets")
DataRoot = Annotated[
    Path | None, typer.Option(help="Folder of data sets; what EQUILIBRIA_DATA names if not set.")
]


@datasets_app.callback(
    epilog="[bold]Examples[/bold]\n\nequilibria datasets\n\n"
    "equilibria datasets get cifar10 --root data"
)
def datasets_command(context: typer.Context, root: DataRoot = None) -> None:
    """List the data sets, where they are, and how to get them."""
    if context.invoked_subcommand is None:
        from equilibria.cli.datasets import show_datasets

        show_datasets(root)


@datasets_app.command("get")
def get_dataset_command(
    name: Annotated[str, typer.Argument(help="Name of the data set.")], root: DataRoot = None
) -> None:
    """Download a data set from its publisher, or say how to get it."""
    from equilibria.cli.datasets import get_dataset

    get_dataset(name, root)


@app.command("recipes")
def recipes_command() -> None:
    """List the recipes that `equilibria train` knows by name."""
    from equilibria.cli.train import show_recipes

    show_recipes()


@app.command("runs", epilog="[bold]Example[/bold]\n\nequilibria runs runs")
def runs_command(
    folder: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path(),
) -> None:
    """List the runs in a folder, finished or interrupted."""
    from equilibria.cli.train import show_runs

    show_runs(folder)


@app.command(
    "compare",
    epilog="[bold]Examples[/bold]\n\nequilibria compare runs/opteq runs/short\n\n"
    "equilibria compare runs/* --evaluate --output comparison",
)
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder for compare.png, the curves, and compare.md.")
    ] = None,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Evaluate finished runs on their test images; kept there."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    device: Annotated[str, typer.Option(help="To evaluate on: auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Show training runs side by side, and where their recipes differ."""
    from equilibria.cli.compare import run_comparison

    run_comparison(
        folders=runs, output=output, evaluate=evaluate, device_name=device, as_json=as_json
    )


@app.command(
    "reproduce",
    epilog="[bold]Examples[/bold]\n\nequilibria reproduce\n\n"
    "equilibria reproduce mopteqs-t1b --quick\n\n"
    "equilibria reproduce geq-t1a --seeds 5 --device cuda --root data",
)
def reproduce_command(
    table: Annotated[
        str | None, typer.Argument(metavar="ID", help="A table; without it, the list of them.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Another, small setting: minutes on a processor.")
    ] = False,
    output: Annotated[
        Path, typer.Option(help="Folder for results and runs; finished runs are used again.")
    ] = Path("results"),
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; 3 if not set.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of a quick run; all cores if not set.")
    ] = None,
    device: Device = "auto",
    root: DataRoot = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show recipes and sizes, and run nothing.")
    ] = False,
    index: Annotated[
        Path | None, typer.Option(help="Print a Markdown list of the results in this folder.")
    ] = None,
) -> None:
    """Run a table of the papers again and set it beside their figures."""
    from equilibria.cli.reproduce import run_reproduction, show_tables
    from equilibria.papers import write_index

    if index is not None:
        print(write_index(index), end="")
        return
    if table is None:
        show_tables(root)
        return
    run_reproduction(
        table_id=table,
        quick=quick,
        output=output,
        seeds=seeds,
        workers=workers,
        device_name=device,
        root=root,
        dry_run=dry_run,
    )


@app.command(
    "tune",
    epilog="[bold]Examples[/bold]\n\nequilibria tune opteq-small\n\n"
    "equilibria tune equilibria-demo --tolerances 1e-3,1e-5 --json",
)
def tune_command(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="Name of a model, or folder of a run.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Images in the batch.")] = 32,
    size: Annotated[
        int | None, typer.Option(min=1, help="Side of the random images of a MODEL; 32 if not set.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Their channels; 3 if not set.")
    ] = None,
    tolerances: Annotated[str, typer.Option(help="Of the forward solve.")] = "1e-2,1e-3,1e-4",
    solvers: Annotated[
        str | None, typer.Option(help="Names, with commas between them; all if not set.")
    ] = None,
    adjoints: Annotated[
        str | None, typer.Option(help="Names, with commas between them; all if not set.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each setting.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights and images.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the fastest solver, tolerance and gradient rule that trains a model right."""
    from equilibria.cli.tune import run_tune

    run_tune(
        target,
        batch=batch,
        size=size,
        channels=channels,
        tolerances=tolerances,
        solvers=solvers,
        adjoints=adjoints,
        repeats=repeats,
        seed=seed,
        as_json=json,
    )


@app.command(
    "bench",
    # Options belong to the benchmarks, --help among them.
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench_command(context: typer.Context) -> None:
    """Measure against TorchDEQ in one run (--quick, --rows NAME, --json FILE, --list, --help)."""
    from equilibria.cli.bench import run_benchmarks

    raise typer.Exit(run_benchmarks(context.args))


def main() -> None:
    """The entry point of the `equilibria` program."""
    app()
