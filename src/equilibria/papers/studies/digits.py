"""Training of every model family on the embedded digits, within a minute each.

    equilibria reproduce digits [models=[NAME,...]] [seed=0] [budget=60]

Models train on 1347 images and are tested on the library's 450 held-out images. All share one
setting, except that models with costly steps train for fewer epochs. Epochs, learning rate and
gradient rule were chosen with validate=true, which holds out a quarter of the training images
instead of the test images. The table has the number of parameters, the held-out accuracy, CPU
seconds of the training on one thread, elapsed seconds, and for the evaluation the mean iterations
of a solve and the share of samples that converged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from equilibria.data import RandomShift, Split, load_digits, stratified_split
from equilibria.papers.studies.family import Contestant, contestants, unavailable
from equilibria.papers.studies.fitting import FitOutcome, Progress, fit, machine, optional
from equilibria.papers.studies.study import Study, StudyOutcome, Work, markdown_table
from equilibria.training import TrainingSettings

TARGET = 0.98
EPOCHS = 30
COSTLY = ("mopteq-small", "mopteq-small+pe", "mondeq-small", "node-small", "anode-small")
COSTLY_EPOCHS = 14
"""Epochs of models for which thirty take about a minute or more."""
LEARNING_RATE = 2e-2
BATCH_SIZE = 64
WEIGHT_DECAY = 1e-2
AUGMENTATION = RandomShift(1)

VALIDATION_SHARE = 0.25
VALIDATION_SEED = 1000
"""Seed of the validation split; the seed of the run is added."""


def epochs_of(contestant: Contestant) -> int:
    """Return the number of training epochs of a contestant."""
    return COSTLY_EPOCHS if contestant.name in COSTLY else EPOCHS


def row(contestant: Contestant, outcome: FitOutcome, epochs: int, budget: float) -> list[str]:
    """Return the table cells of one trained model."""
    reached = outcome.accuracy >= TARGET and outcome.seconds <= budget
    return [
        contestant.title,
        f"{outcome.parameters:,d}",
        f"{outcome.accuracy:.2%}",
        f"{outcome.samples - outcome.correct}",
        f"{epochs}",
        f"{outcome.seconds:.1f}",
        f"{outcome.elapsed:.1f}",
        optional(outcome.mean_iterations, ".1f"),
        optional(outcome.share_converged, ".1%"),
        "yes" if reached else "no",
    ]


def heading(budget: float) -> list[str]:
    """Return the column titles of the table."""
    return [
        *("model", "parameters", "accuracy", "errors", "epochs", "CPU s", "clock s"),
        *("iterations", "converged", f"{TARGET:.0%} in {budget:g} s"),
    ]


@dataclass(frozen=True)
class DigitsSettings:
    """Settings of the study.

    Args:
        models: Names of models; all available ones if empty.
        seed: Seed of initialization and batches.
        budget: CPU seconds within which a model should reach the target accuracy.
        epochs: Number of epochs; by default 30, or 14 for models with costly steps.
        learning_rate: Learning rate.
        validate: Test on a quarter of the training images instead of the test images.
    """

    models: tuple[str, ...] = ()
    seed: int = 0
    budget: float = 60.0
    epochs: int | None = None
    learning_rate: float = LEARNING_RATE
    validate: bool = False


def carry_out(settings: DigitsSettings, work: Work) -> StudyOutcome:
    """Train each model on the digits and test it."""
    chosen = contestants(settings.models or None)
    training_settings = TrainingSettings(
        epochs=EPOCHS if settings.epochs is None else settings.epochs,
        batch_size=BATCH_SIZE,
        learning_rate=settings.learning_rate,
        weight_decay=WEIGHT_DECAY,
        seed=settings.seed,
        tolerance=None,
    )
    torch.set_num_threads(1)
    data = load_digits()
    training, test = data.train, data.test
    if settings.validate:
        part = VALIDATION_SEED + settings.seed
        training, test = stratified_split(data.train, VALIDATION_SHARE, part)
    about = (
        f"{len(training)} digits to train on, {len(test)} "
        f"{'held-out training images' if settings.validate else 'held out'}; "
        f"learning rate {settings.learning_rate:g}, seed {settings.seed}; {machine()}."
    )
    if not settings.models and unavailable():
        about += f" Not available: {', '.join(unavailable())}."
    assert isinstance(training, Split)
    assert isinstance(test, Split)
    progress = Progress(work, len(chosen))
    rows, outcomes = [heading(settings.budget)], []
    for contestant in chosen:
        epochs = settings.epochs or epochs_of(contestant)
        outcome = fit(
            contestant,
            training,
            test,
            replace(training_settings, epochs=epochs),
            augmentation=AUGMENTATION,
            on_step=progress.follow(contestant.title),
        )
        progress.finish_run()
        outcomes.append(outcome.as_data())
        rows.append(row(contestant, outcome, epochs, settings.budget))
        work.report(" | ".join(rows[-1]))
    return StudyOutcome({"runs": outcomes}, "\n".join(markdown_table(rows)), about)


STUDY = Study("digits", "", "Does every family of models train?", DigitsSettings, carry_out)
