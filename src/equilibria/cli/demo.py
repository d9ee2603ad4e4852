"""`equilibria demo`: train a small equilibrium network and write a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

import equilibria as eq
from equilibria.cli.app import Device, JsonObject, Overwrite, Seed, command, page_footer
from equilibria.cli.console import output_console, print_facts, print_json, say
from equilibria.cli.progress import follow, keeping

RECIPE = "digits-opteq"
EXAMPLES = (
    "equilibria demo",
    "equilibria demo --model deep-opteq-small --output runs/deep",
    "equilibria demo --epochs 5 --seed 1 --device cpu",
)


@command("demo", *EXAMPLES)
def demo(
    output: Annotated[
        Path, Option(help="Folder for report, figure, weights, metrics and configuration.")
    ] = Path("equilibria-demo"),
    model: Annotated[
        str, Option(help="Name of a model (see `equilibria models`).")
    ] = "opteq-small",
    epochs: Annotated[
        int | None, Option(min=1, help="Number of passes over the training images.")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: JsonObject = False,
) -> None:
    """Train a small equilibrium network on handwritten digits and write a report."""
    from equilibria.report.tables import run_rows
    from equilibria.training.recipe import PACKAGED

    console = Console(stderr=True) if as_json else output_console()
    changes = [f"model.name={model}", f"training.seed={seed}"]
    changes += [] if epochs is None else [f"training.epochs={epochs}"]
    torch_device = eq.training.processes.choose_device(device)
    recipe = eq.training.load_recipe(PACKAGED / f"{RECIPE}.yaml", changes)
    known = eq.models.model_options(model)
    options = {name: value for name, value in recipe.model.options.items() if name in known}
    recipe = replace(recipe, model=replace(recipe.model, options=options))
    experiment = eq.training.experiment.Experiment.of(recipe)
    if not isinstance(experiment.model, eq.models.EquilibriumClassifier):
        raise TypeError(
            f"the demo needs a classifier with an equilibrium layer, and {model!r} has none; use "
            "for example --model opteq-small"
        )
    try:
        run = eq.training.RunFolder.opened(
            output, recipe.as_data(), experiment.facts(), overwrite=overwrite
        )
    except OSError as error:
        raise OSError(f"cannot write the run: {error}; give another folder with --output") from None
    with keeping(run, eq.training.processes.ALONE):
        history = follow(experiment, run, torch_device, console, eq.training.processes.ALONE)
        findings = eq.analysis.measure_run(experiment, history, name=str(output))
        page = eq.report.report_page([findings], page_footer(experiment))
        eq.training.files.write_atomically(run.report, page.encode())
        assert findings.explanation is not None
        drawn = eq.report.figures.convergence_charts(
            findings.explanation.convergence, findings.explanation.comparison
        )
        for name, content in eq.report.figures.themed(drawn).files("convergence").items():
            eq.training.files.write_atomically(run.report.with_name(name), content)
    title = f"{model} on the {len(experiment.test)} test images"
    if as_json:
        print_json({"report": str(run.report), "title": title, **dict(run_rows(findings))})
        return
    print_facts(title, run_rows(findings), console)
    say(f"Report: {run.report}")
