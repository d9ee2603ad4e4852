"""`equilibria train`, `evaluate`, `recipes` and `runs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from equilibria.cli.console import TrainingDisplay, fail, print_table
from equilibria.models import parameter_count
from equilibria.tasks import Evaluation, SegmentationEvaluation
from equilibria.training import (
    Experiment,
    NonFiniteError,
    RunFolder,
    choose_device,
    list_recipes,
    load_recipe,
    trained,
)


def run_training(
    *, recipe: str, overrides: list[str], output: Path, resume: bool, device_name: str
) -> None:
    """Train as a recipe says, into the folder `output`."""
    console = Console(highlight=False)
    try:
        chosen = load_recipe(recipe, overrides)
        device = choose_device(device_name)
        run = _open_run(output, chosen.as_data(), resume)
        experiment = Experiment.of(chosen)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    console.print(_yaml(chosen.as_data()), markup=False)
    console.print(
        f"{chosen.model.name} ({parameter_count(experiment.model):,} parameters) on "
        f"{experiment.data.name}: {len(experiment.training)} images to train on, on {device}."
    )
    try:
        with TrainingDisplay(console, chosen.training.epochs).running() as display:
            experiment.train(run, device, on_epoch=display.on_epoch, on_step=display.on_step)
    except NonFiniteError as error:
        fail(str(error), code=1)
    result = experiment.evaluate()
    print_table(console, f"On the {len(experiment.test)} test images", _rows(result))
    console.print(f"Run: {output}", soft_wrap=True)


def run_evaluation(*, folder: Path, device_name: str, as_json: bool) -> None:
    """Evaluate a finished run on its test images."""
    try:
        device = choose_device(device_name)
        experiment = trained(folder, device=device)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    result = experiment.evaluate()
    if as_json:
        print(json.dumps(as_data(experiment, result), indent=2, allow_nan=False))
        return
    title = f"{experiment.recipe.model.name} on the {len(experiment.test)} test images"
    print_table(Console(highlight=False), title, _rows(result))


def as_data(experiment: Experiment, result: Evaluation | SegmentationEvaluation) -> dict[str, Any]:
    """The evaluation as one object."""
    of_pixels = {}
    if isinstance(result, SegmentationEvaluation):
        of_pixels = {"mean_iou": result.mean_iou, "mean_accuracy": result.mean_accuracy}
    return {
        "model": experiment.recipe.model.name,
        "data": experiment.data.name,
        "parameters": parameter_count(experiment.model),
        "samples": result.samples,
        "accuracy": result.accuracy,
        **of_pixels,
        "loss": result.loss,
        "mean_iterations": result.solves.mean_iterations,
        "max_iterations": result.solves.max_iterations,
        "share_converged": result.solves.share_converged,
        "max_residual": result.solves.max_residual,
    }


def show_recipes() -> None:
    """The recipes by name."""
    table = Table(box=box.SIMPLE)
    for column in ("Name", "Model", "Data", "Epochs", "What it is"):
        table.add_column(column, no_wrap=column != "What it is")
    for name, path in list_recipes().items():
        recipe = load_recipe(path)
        table.add_row(
            name, recipe.model.name, recipe.data.name, str(recipe.training.epochs), recipe.about
        )
    Console(highlight=False).print(table)


def show_runs(folder: Path) -> None:
    """The runs in a folder, with where they stand."""
    table = Table(box=box.SIMPLE)
    for column in ("Run", "Model", "Data", "Epochs", "Loss", "Accuracy", "State"):
        table.add_column(column)
    found = sorted(path.parent for path in folder.glob("**/config.yaml"))
    for path in found:
        run = RunFolder(path)
        try:
            recipe = load_recipe(run.config)
        except ValueError:
            continue  # A run of another kind, such as that of the demonstration.
        metrics = run.read_metrics()
        last = metrics[-1] if metrics else None
        table.add_row(
            str(path),
            recipe.model.name,
            recipe.data.name,
            f"{len(metrics)}/{recipe.training.epochs}",
            "" if last is None else f"{last['loss']:.4f}",
            "" if last is None else f"{last['accuracy']:.2%}",
            "finished" if run.weights.exists() else "interrupted",
        )
    Console(highlight=False).print(table)


def _open_run(output: Path, config: dict[str, Any], resume: bool) -> RunFolder:
    if not resume or not (output / "config.yaml").exists():
        return RunFolder.create(output, config)
    run = RunFolder(output)
    if load_recipe(run.config).as_data() != config:
        raise ValueError(
            f"{run.config} is another recipe than the one given: resume with that recipe "
            f"(equilibria train {run.config} --output {output} --resume), or name a new folder"
        )
    return run


def _rows(result: Evaluation | SegmentationEvaluation) -> list[tuple[str, str]]:
    if isinstance(result, SegmentationEvaluation):
        rows = [
            ("mIoU", f"{result.mean_iou:.2%}"),
            ("mAcc", f"{result.mean_accuracy:.2%}"),
            ("aAcc", f"{result.accuracy:.2%} ({result.correct} of {result.samples} pixels)"),
        ]
    else:
        rows = [("Accuracy", f"{result.accuracy:.2%} ({result.correct} of {result.samples})")]
    rows.append(("Loss", f"{result.loss:.4f}"))
    solves = result.solves
    if solves.mean_iterations is not None and solves.share_converged is not None:
        rows.append(("Iterations, mean", f"{solves.mean_iterations:.1f}"))
        rows.append(("Share converged", f"{solves.share_converged:.1%}"))
    return rows


def _yaml(data: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True)).rstrip()
