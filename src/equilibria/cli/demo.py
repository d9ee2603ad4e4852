"""`equilibria demo`: train a small equilibrium network, and show what it computes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from equilibria import __version__
from equilibria.cli.console import TrainingDisplay, fail, print_table
from equilibria.data import Batches, DataSet, RandomShift, load_digits
from equilibria.models import EquilibriumClassifier, create_model, model_options
from equilibria.report import (
    ClassifierReport,
    Summary,
    choose_examples,
    follow_solve,
    model_formula,
    objective_change,
)
from equilibria.solvers import Picard
from equilibria.tasks import Classification, Evaluation, evaluate
from equilibria.training import (
    DataRecipe,
    EpochMetrics,
    ModelRecipe,
    NonFiniteError,
    Recipe,
    RunFolder,
    TaskRecipe,
    TrainingSettings,
    choose_device,
    train,
)

# The recipe was chosen on parts of the training images; the test images had no say in it.
BATCH_SIZE = 64
LEARNING_RATE = 2e-2
WEIGHT_DECAY = 1e-2
TASK = Classification(label_smoothing=0.05)
AUGMENTATION = RandomShift(1)
HEAD_POOL = 4

EVALUATION_BATCH = 256
FOLLOWED_IMAGES = 64
FOLLOWED_TOLERANCE = 1e-6
FOLLOWED_ITERATIONS = 500


def run_demo(*, output: Path, model_name: str, epochs: int, seed: int, device_name: str) -> None:
    """The whole demonstration."""
    console = Console(highlight=False)
    # Images of 8×8 give a second thread nothing to do; on a busy machine it only waits for the
    # first, and the first for it.
    torch.set_num_threads(1)
    settings = TrainingSettings(
        epochs=epochs,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        seed=seed,
    )
    data = load_digits()
    try:
        device = choose_device(device_name)
        torch.manual_seed(seed)
        model, options = make_classifier(model_name, data)
    except (TypeError, ValueError) as error:
        fail(str(error))
    try:
        run = RunFolder.create(output, as_recipe(model_name, options, settings).as_data())
    except OSError as error:
        fail(f"cannot write the run: {error}; choose another folder with --output")

    console.print(
        f"{model_name} on {data.name}: {len(data.train)} images to train on, "
        f"{len(data.test)} to test, on {device}."
    )
    started = time.perf_counter()
    try:
        history = train_with_display(model, data, settings, device, console, run)
    except NonFiniteError as error:
        fail(str(error), code=1)
    training_seconds = time.perf_counter() - started
    run.save_weights(model, {"model": model_name})

    evaluation = evaluate(model, Batches(data.test, EVALUATION_BATCH))
    bound = model.contraction_bound(data.test.images[:1].to(device))
    summary = Summary(
        evaluation=evaluation,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        contraction=None if bound is None else float(bound.max()),
        objective=objective_change(model, Batches(data.test, EVALUATION_BATCH)),
        training_seconds=training_seconds,
    )
    print_table(console, f"{model_name} on the {len(data.test)} test images", summary.rows())
    footer = f"equilibria {__version__} · torch {torch.__version__} · seed {seed}"
    run.write_report(report(model, model_name, data, evaluation, summary, history, footer).html())
    console.print(f"Report: {run.report}", soft_wrap=True)


def make_classifier(name: str, data: DataSet) -> tuple[EquilibriumClassifier, dict[str, Any]]:
    """The model for these images, and the options it was made with."""
    options: dict[str, Any] = {
        "in_channels": data.channels,
        "num_classes": len(data.class_names),
    }
    # The images are small: average over 2×2 pixels, not over quarters of the image.
    if "pool" in model_options(name):
        options["pool"] = HEAD_POOL
    model = create_model(name, **options)
    if not isinstance(model, EquilibriumClassifier):
        raise TypeError(
            f"the demonstration needs a classifier with an equilibrium layer, which {name!r} is "
            "not; try --model opteq-small"
        )
    return model, options


def as_recipe(name: str, options: dict[str, Any], settings: TrainingSettings) -> Recipe:
    """What config.yaml holds: all that is needed to run it again, by `equilibria train`."""
    return Recipe(
        about="The demonstration.",
        model=ModelRecipe(name=name, options=options),
        data=DataRecipe(name="digits", augmentation=({"shift": {"pixels": AUGMENTATION.pixels}},)),
        task=TaskRecipe(label_smoothing=TASK.label_smoothing),
        training=settings,
        threads=1,
    )


def train_with_display(
    model: EquilibriumClassifier,
    data: DataSet,
    settings: TrainingSettings,
    device: torch.device,
    console: Console,
    run: RunFolder,
) -> list[EpochMetrics]:
    with TrainingDisplay(console, settings.epochs).running() as display:

        def on_epoch(metrics: EpochMetrics) -> None:
            run.append_metrics(metrics)
            display.on_epoch(metrics)

        return train(
            model,
            TASK,
            data.train,
            settings,
            augmentation=AUGMENTATION,
            device=device,
            on_epoch=on_epoch,
            on_step=display.on_step,
        )


def report(
    model: EquilibriumClassifier,
    model_name: str,
    data: DataSet,
    evaluation: Evaluation,
    summary: Summary,
    history: list[EpochMetrics],
    footer: str,
) -> ClassifierReport:
    followed = data.test.images[:FOLLOWED_IMAGES]
    own_solver = replace(
        model.layer.solver, tolerance=FOLLOWED_TOLERANCE, max_iterations=FOLLOWED_ITERATIONS
    )
    picard = Picard(tolerance=FOLLOWED_TOLERANCE, max_iterations=FOLLOWED_ITERATIONS)
    return ClassifierReport(
        model_name=model_name,
        data_name=data.name,
        class_names=data.class_names,
        formula=model_formula(model),
        summary=summary,
        picard=follow_solve(model, followed, picard),
        comparison=(
            None if isinstance(own_solver, Picard) else follow_solve(model, followed, own_solver)
        ),
        examples=choose_examples(data.test, evaluation),
        history=history,
        footer=footer,
    )
