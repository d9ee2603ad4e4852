"""Does every family train? Each model on the embedded digits, within a minute.

    python -m studies.digits [--models NAME ...] [--seed S] [--budget 60]

1347 images to train on, the library's 450 held-out images to test on. One setting for all models,
but for fewer epochs where a step costs most. Epochs, learning rate and gradient rule were chosen on
parts of the training images (--validate repeats that: a quarter of them takes the place of the
held-out ones). The table says how many parameters a model has, its held-out accuracy, the CPU
seconds of its training on one thread and those on the clock (more where other programs want the
core), the mean iterations of a solve in evaluation and the share of samples whose solve converged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console

from equilibria.data import RandomShift, load_digits, stratified_split
from equilibria.training import TrainingSettings
from studies._family import Contestant, contestants, left_out
from studies._training import Display, Outcome, fit, machine, optional

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
    return COSTLY_EPOCHS if contestant.name in COSTLY else EPOCHS


def row(contestant: Contestant, outcome: Outcome, epochs: int, budget: float) -> str:
    reached = outcome.accuracy >= TARGET and outcome.seconds <= budget
    return (
        f"{contestant.title:22s} {outcome.parameters:8,d} {outcome.accuracy:8.2%} "
        f"{outcome.samples - outcome.correct:6d} {epochs:6d} {outcome.seconds:9.1f} "
        f"{outcome.elapsed:8.1f} {optional(outcome.mean_iterations, '.1f'):>10s} "
        f"{optional(outcome.share_converged, '.1%'):>9s}  {'yes' if reached else 'no'}"
    )


def heading(budget: float) -> str:
    return (
        f"{'':22s} {'params':>8s} {'accuracy':>8s} {'errors':>6s} {'epochs':>6s} {'CPU s':>9s} "
        f"{'clock s':>8s} {'iterations':>10s} {'converged':>9s}  {TARGET:.0%} in {budget:g} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: the whole family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60, help="CPU seconds a model may take")
    parser.add_argument("--epochs", type=int, help="of every model; default: 30, or 14 if costly")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument(
        "--validate", action="store_true", help="test on a part of the training images instead"
    )
    options = parser.parse_args(arguments)
    try:
        chosen = contestants(options.models)
        settings = TrainingSettings(
            epochs=EPOCHS if options.epochs is None else options.epochs,
            batch_size=BATCH_SIZE,
            learning_rate=options.learning_rate,
            weight_decay=WEIGHT_DECAY,
            seed=options.seed,
            tolerance=None,
        )
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    data = load_digits()
    training, test = data.train, data.test
    if options.validate:
        part = VALIDATION_SEED + options.seed
        training, test = stratified_split(data.train, VALIDATION_SHARE, part)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{len(training)} digits to train on, {len(test)} "
        f"{'training images left out' if options.validate else 'held out'}; "
        f"learning rate {options.learning_rate:g}, seed {options.seed}; {machine()}"
    )
    if options.models is None and left_out():
        console.print(f"Left out: {', '.join(left_out())}")
    console.print(heading(options.budget))
    display = Display(console, len(chosen))
    with display.running():
        for contestant in chosen:
            epochs = options.epochs or epochs_of(contestant)
            outcome = fit(
                contestant,
                training,
                test,
                replace(settings, epochs=epochs),
                augmentation=AUGMENTATION,
                on_step=display.follow(contestant.title),
            )
            display.finish_run()
            console.print(row(contestant, outcome, epochs, options.budget))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
