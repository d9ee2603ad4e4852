"""`equilibria evaluate`: evaluate a trained model on test images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import (
    Best,
    Certified,
    DataRoot,
    Device,
    JsonObject,
    OverwriteFiles,
    SomeRun,
    command,
    opened,
    opened_model,
)
from equilibria.cli.console import print_facts, print_json, shown
from equilibria.cli.faults import check_new, complain, unanswered, warn, writable_file

if TYPE_CHECKING:
    import torch

DRAWN_IMAGES = 4


@command(
    "evaluate",
    "equilibria evaluate runs/opteq --json",
    "equilibria evaluate runs/cifar10 --best --root data",
    "equilibria evaluate runs/cifar10 --data cifar10-c corruption=fog severity=3",
    "equilibria evaluate runs/cifar10 --data cifar10 corrupted=fog:3 test_samples=1000",
    "equilibria evaluate runs/opteq --certified",
    "equilibria evaluate runs/mazes --data mazes test_size=25 --max-iterations 600 --starts 4",
)
def evaluate(
    run: SomeRun,
    options: Annotated[
        list[str] | None,
        Argument(metavar="KEY=VALUE...", help="Options of the data set given by --data."),
    ] = None,
    data: Annotated[
        str | None, Option(metavar="NAME", help="Another data set with the same number of classes.")
    ] = None,
    best: Best = False,
    root: DataRoot = None,
    draw: Annotated[
        Path | None,
        Option(
            help="PNG file of segmented test images, if the run segments images.",
            callback=writable_file,
        ),
    ] = None,
    certified: Certified = False,
    max_iterations: Annotated[
        int | None, Option(min=1, help="Largest number of iterations per solve.")
    ] = None,
    starts: Annotated[
        int | None,
        Option(min=1, help="Number of starts per image; that with the smallest residual counts."),
    ] = None,
    overwrite: OverwriteFiles = False,
    as_json: JsonObject = False,
    device: Device = "auto",
) -> None:
    """Evaluate a trained model on its test images, or on those of another data set.

    Images of another data set are converted to the colors and the size of the run's images, unless
    the model takes images of any size.
    """
    check_new(draw, overwrite=overwrite)
    torch_device = eq.training.processes.choose_device(device)
    experiment = _opened_on(run, torch_device, best, root, data, options or [])
    if draw is not None:
        eq.training.files.write_atomically(draw, _drawn(experiment, torch_device))
    evaluated = experiment.until_certain() if certified else experiment
    with eq.solving(evaluated.model, max_iterations=max_iterations, starts=starts):
        result = evaluated.evaluate()
    share = evaluated.model.share_certified if certified else None
    if as_json:
        more = {} if share is None else {"share_certified": share}
        print_json(as_data(experiment, result) | more)
    else:
        title = f"{experiment.recipe.model.name} on the {len(experiment.test)} test images"
        if data is not None:
            title += f" of {experiment.data.name}"
        print_facts(title, [*rows(result), ("Class certified", shown(share, ".1%"))])
    complain(
        unanswered(result.figures.get("unanswered"), result.samples, f"{experiment.task.unit}s")
    )


def _opened_on(
    run: Path,
    device: torch.device,
    best: bool,
    root: Path | None,
    data: str | None,
    options: list[str],
) -> eq.training.experiment.Experiment:
    """Open a run with its data, or with another data set."""
    if data is None:
        if options:
            raise ValueError(
                f"{options[0]} is an option of another data set; give its name with --data"
            )
        return opened(run, device, best, root)
    other = eq.data.load_dataset(data, root, **eq.training.recipe.with_overrides({}, options))
    experiment = eq.training.other_data.on_other_data(opened_model(run, device, best), other)
    if experiment.task.names_classes and other.class_names != experiment.images.class_names:
        warn(
            "the data set and the run name their classes differently; classes are matched by order"
        )
    return experiment


def _drawn(experiment: eq.training.experiment.Experiment, device: torch.device) -> bytes:
    """Draw some test images with true classes, predicted classes, and errors."""
    import torch

    from equilibria.report.segmentation import segmentation_png

    if not isinstance(experiment.task, eq.tasks.Segmentation):
        raise ValueError("--draw needs a run that segments images, and this one does not")
    images, labels = experiment.some_test_images(DRAWN_IMAGES)
    with torch.no_grad():
        logits = experiment.model(images.to(device))
    return segmentation_png(
        images,
        labels,
        logits.argmax(dim=1).cpu(),
        experiment.data.class_names,
        ignore_index=experiment.task.ignore_index,
    )


def as_data(
    experiment: eq.training.experiment.Experiment, result: eq.tasks.Evaluation
) -> dict[str, Any]:
    """Return an evaluation as JSON-compatible data."""
    return {
        "model": experiment.recipe.model.name,
        "data": experiment.data.name,
        "parameters": eq.models.registry.parameter_count(experiment.model),
        "samples": result.samples,
        **{name: value for name, value in result.figures.items() if value is not None},
        "loss": result.loss,
        "mean_iterations": result.solves.mean_iterations,
        "max_iterations": result.solves.max_iterations,
        "share_converged": result.solves.share_converged,
        "max_residual": result.solves.max_residual,
    }


def rows(result: eq.tasks.Evaluation) -> list[tuple[str, str]]:
    """Return an evaluation as rows of (label, value)."""
    figures = dict(eq.report.labels.figure_rows(result.figures))
    if result.correct is not None and "Accuracy" in figures:
        figures["Accuracy"] += f" ({result.correct} of {result.samples})"
    return [
        *figures.items(),
        ("Loss", shown(result.loss, ".4f")),
        ("Iterations, mean", shown(result.solves.mean_iterations, ".1f")),
        ("Share converged", shown(result.solves.share_converged, ".1%")),
    ]
