"""Does every family train? Each model on the embedded digits, within a minute.

    equilibria reproduce digits [models=[NAME,...]] [seed=0] [budget=60]

1347 images to train on, the library's 450 held-out images to test on. One setting for all models,
but for fewer epochs where a step costs most. Epochs, learning rate and gradient rule were chosen on
parts of the training images (validate=true repeats that: a quarter of them takes the place of the
held-out ones). The table says how many parameters a model has, its held-out accuracy, the CPU
seconds of its training on one thread and those on the clock (more where other programs want the
core), the mean iterations of a solve in evaluation and the share of samples whose solve converged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from equilibria.data import RandomShift, Split, load_digits, stratified_split
from equilibria.papers.studies.family import Contestant, contestants, left_out
from equilibria.papers.studies.fitting import FitOutcome, Progress, fit, machine, optional
from equilibria.papers.studies.study import Found, Study, Work, markdown_table
from equilibria.training import TrainingSettings

TARGET = 0.98
EPOCHS = 30
COSTLY = ("mopteq-small", "mopteq-small+pe", "mondeq-small", "node-small", "anode-small")
COSTLY_EPOCHS = 14
"""For models of which thirty epochs take about a minute or more."""
LEARNING_RATE = 2e-2
BATCH_SIZE = 64
WEIGHT_DECAY = 1e-2
AUGMENTATION = RandomShift(1)

VALIDATION_SHARE = 0.25
VALIDATION_SEED = 1000
"""Of the parting of the training images; a run's own seed is added."""


def epochs_of(contestant: Contestant) -> int:
    """Return the number of training epochs of a contestant."""
    return COSTLY_EPOCHS if contestant.name in COSTLY else EPOCHS


def row(contestant: Contestant, outcome: FitOutcome, epochs: int, budget: float) -> list[str]:
    """The cells of one model."""
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
    """The names of the columns."""
    return [
        *("model", "parameters", "accuracy", "errors", "epochs", "CPU s", "clock s"),
        *("iterations", "converged", f"{TARGET:.0%} in {budget:g} s"),
    ]


@dataclass(frozen=True)
class Settings:
    """Settings of the study; `epochs` None: 30, or 14 for models whose steps cost most."""

    models: tuple[str, ...] = ()
    seed: int = 0
    budget: float = 60.0
    epochs: int | None = None
    learning_rate: float = LEARNING_RATE
    validate: bool = False


def carry_out(settings: Settings, work: Work) -> Found:
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
        f"{'training images left out' if settings.validate else 'held out'}; "
        f"learning rate {settings.learning_rate:g}, seed {settings.seed}; {machine()}."
    )
    if not settings.models and left_out():
        about += f" Left out: {', '.join(left_out())}."
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
        work.say(" | ".join(rows[-1]))
    return Found({"runs": outcomes}, "\n".join(markdown_table(rows)), about)


STUDY = Study("digits", "", "Does every family of models train?", Settings, carry_out)
