"""`equilibria evaluate`: a trained model on its test images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Option

from equilibria.cli.app import Best, Device, FinishedRun, JsonObject, command, opened
from equilibria.cli.console import figure_rows, print_facts, print_json, shown
from equilibria.cli.faults import complain, unanswered, writable_file
from equilibria.models import parameter_count
from equilibria.report import segmentation_png
from equilibria.tasks import Evaluation, Segmentation
from equilibria.training import Experiment, choose_device, write_atomically

DRAWN_IMAGES = 4


@command(
    "evaluate", "equilibria evaluate runs/opteq --json", "equilibria evaluate runs/opteq --best"
)
def evaluate(
    run: FinishedRun,
    best: Best = False,
    draw: Annotated[
        Path | None,
        Option(
            help="PNG of test images with classes, if the run segments.", callback=writable_file
        ),
    ] = None,
    as_json: JsonObject = False,
    device: Device = "auto",
) -> None:
    """Evaluate a trained model on its test images."""
    where = choose_device(device)
    experiment = opened(run, where, best)
    if draw is not None:
        write_atomically(draw, _drawn(experiment, where))
    result = experiment.evaluate()
    if as_json:
        print_json(as_data(experiment, result))
    else:
        title = f"{experiment.recipe.model.name} on the {len(experiment.test)} test images"
        print_facts(title, rows(result))
    complain(
        unanswered(result.figures.get("unanswered"), result.samples, f"{experiment.task.unit}s")
    )


@torch.no_grad()
def _drawn(experiment: Experiment, device: torch.device) -> bytes:
    """Some test images with their true classes, the predicted ones, and the errors."""
    if not isinstance(experiment.task, Segmentation):
        raise ValueError("--draw shows the classes of pixels, and this run knows none")
    images, labels = experiment.some_test_images(DRAWN_IMAGES)
    logits = experiment.model(images.to(device))
    return segmentation_png(
        images,
        labels,
        logits.argmax(dim=1).cpu(),
        experiment.data.class_names,
        ignore_index=experiment.task.ignore_index,
    )


def as_data(experiment: Experiment, result: Evaluation) -> dict[str, Any]:
    """The evaluation as one object."""
    return {
        "model": experiment.recipe.model.name,
        "data": experiment.data.name,
        "parameters": parameter_count(experiment.model),
        "samples": result.samples,
        **{name: value for name, value in result.figures.items() if value is not None},
        "loss": result.loss,
        "mean_iterations": result.solves.mean_iterations,
        "max_iterations": result.solves.max_iterations,
        "share_converged": result.solves.share_converged,
        "max_residual": result.solves.max_residual,
    }


def rows(result: Evaluation) -> list[tuple[str, str]]:
    """The evaluation as (label, value)."""
    found = dict(figure_rows(result.figures))
    if result.correct is not None and "Accuracy" in found:
        found["Accuracy"] += f" ({result.correct} of {result.samples})"
    return [
        *found.items(),
        ("Loss", shown(result.loss, ".4f")),
        ("Iterations, mean", shown(result.solves.mean_iterations, ".1f")),
        ("Share converged", shown(result.solves.share_converged, ".1%")),
    ]
