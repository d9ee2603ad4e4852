"""Which of the family learns best from few, noisy images? Paired over seeds.

    python -m studies.noisy_digits --output DIRECTORY [--models NAME ...] [--seeds 0 1 2 ...]

A seed draws 300 of the library's training images and noise of standard deviation 0.35 for them and
for the 450 held-out images, the test (pixels lie in [0, 1]; the noise of an image is drawn once).
While training, images are moved by up to a pixel. All models of a seed see the same images, noise,
order and shifts. Accuracies are compared seed by seed with those of a reference, so that what a
draw makes easy or hard cancels.

Epochs and learning rate are the same for all models. They were chosen with --validate, which tests
on the training images that a seed did not draw, at seeds that are not the study's.

Writes noisy-digits.json after every run, and goes on where an earlier call ended; at the end the
table noisy-digits.md and the picture noisy-digits.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from equilibria.data import DataSet, GaussianNoise, RandomShift, Split, load_digits
from equilibria.report.style import LIGHT, drawing, dress_axes, figure_png, plain_axis
from equilibria.training import TrainingSettings, write_atomically
from studies._family import Contestant, contestants, left_out
from studies._paired import Difference, deviation
from studies._training import (
    EVALUATION_TOLERANCE,
    GRADIENT_RULE,
    TRAINING_TOLERANCE,
    Display,
    Outcome,
    fit,
    machine,
    optional,
)

IMAGES = 300
NOISE = 0.35
SHIFT = 1
CORRUPTION = GaussianNoise(NOISE)
AUGMENTATION = RandomShift(SHIFT)

SEEDS = tuple(range(7))
VALIDATION_SEEDS = (100, 101)
EPOCHS = 40
LEARNING_RATE = 2e-2
BATCH_SIZE = 32
WEIGHT_DECAY = 1e-2
REFERENCE = "opteq-small"

Results = dict[str, dict[int, Outcome]]
"""By model, then by seed."""


def draw(data: DataSet, seed: int, *, validate: bool = False) -> tuple[Split, Split]:
    """The noisy images of a seed: to train on and to test on."""
    chance = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.train), generator=chance)
    training = data.train.subset(order[:IMAGES])
    test = data.train.subset(order[IMAGES:]) if validate else data.test
    return corrupted(training, chance), corrupted(test, chance)


def corrupted(split: Split, chance: torch.Generator) -> Split:
    return Split(*CORRUPTION(split.images, split.labels, chance))


def setting_of(epochs: int, learning_rate: float, validate: bool) -> dict[str, Any]:
    """All that the accuracies depend on, besides model and seed."""
    return {
        "training_images": IMAGES,
        "noise": NOISE,
        "shift": SHIFT,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_size": BATCH_SIZE,
        "weight_decay": WEIGHT_DECAY,
        "gradient_rule": type(GRADIENT_RULE).__name__,
        "training_tolerance": TRAINING_TOLERANCE,
        "evaluation_tolerance": EVALUATION_TOLERANCE,
        "tested_on": "training images not drawn" if validate else "held-out images",
    }


class Record:
    """The JSON file: a setting and the runs under it, kept up to date."""

    def __init__(self, path: Path, setting: Mapping[str, Any]) -> None:
        self.path = path
        self.setting = dict(setting)
        self.runs: list[Outcome] = []
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["setting"] != self.setting:
                raise ValueError(
                    f"{path} holds runs with another setting: choose another --output, or remove it"
                )
            self.runs = [Outcome(**run) for run in content["runs"]]

    def has(self, name: str, seed: int) -> bool:
        return any((run.name, run.seed) == (name, seed) for run in self.runs)

    def add(self, run: Outcome) -> None:
        self.runs.append(run)
        self.save()

    def save(self) -> None:
        content = {
            "study": "noisy digits",
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "setting": self.setting,
            "runs": [run.as_data() for run in self.runs],
        }
        text = json.dumps(content, indent=1) + "\n"
        write_atomically(self.path, text.encode())

    def results(self, chosen: Sequence[Contestant], seeds: Sequence[int]) -> Results:
        """The runs asked for, in their order."""
        found = {(run.name, run.seed): run for run in self.runs}
        return {c.name: {seed: found[c.name, seed] for seed in seeds} for c in chosen}


def accuracies(runs: Mapping[int, Outcome]) -> dict[int, float]:
    return {seed: run.accuracy for seed, run in runs.items()}


def differences(results: Results, reference: str) -> dict[str, Difference]:
    base = accuracies(results[reference])
    return {
        name: Difference.between(accuracies(runs), base)
        for name, runs in results.items()
        if name != reference
    }


def table(chosen: Sequence[Contestant], results: Results, reference: str) -> list[list[str]]:
    """The heading and one row a model, as cells."""
    against = differences(results, reference)
    title = next(c.title for c in chosen if c.name == reference)
    rows = [
        [
            "model",
            "parameters",
            "accuracy (%)",
            f"minus {title} (points)",
            "95 % interval",
            "better / equal / worse",
            "CPU s",
            "iterations",
            "converged",
        ]
    ]
    for contestant in chosen:
        runs = list(results[contestant.name].values())
        scores = [100 * run.accuracy for run in runs]
        cells = [
            contestant.title,
            f"{runs[0].parameters:,}",
            f"{mean(scores):.2f} ± {deviation(scores):.2f}",
        ]
        if contestant.name == reference:
            cells += ["–", "–", "–"]
        else:
            difference = against[contestant.name]
            low, high = difference.interval
            cells += [
                f"{100 * difference.mean:+.2f} ± {100 * difference.deviation:.2f}",
                f"[{100 * low:+.2f}, {100 * high:+.2f}]",
                " / ".join(map(str, difference.signs)),
            ]
        cells += [
            f"{mean([run.seconds for run in runs]):.1f}",
            optional(mean([run.mean_iterations for run in runs]), ".1f"),
            optional(mean([run.share_converged for run in runs]), ".1%"),
        ]
        rows.append(cells)
    return rows


def mean(values: Sequence[float | None]) -> float | None:
    """None where a value is."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(values) else None


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (cell for cell in row)
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def findings(chosen: Sequence[Contestant], results: Results, reference: str) -> list[str]:
    """What the intervals say, for and against."""
    titles = {contestant.name: contestant.title for contestant in chosen}
    against = differences(results, reference)
    phrases = {
        "above": "Better than {} (the interval lies above zero): {}.",
        "below": "Worse than {} (below zero): {}.",
        "undecided": "Not told apart from {} by these seeds (the interval holds zero): {}.",
    }
    lines = []
    for verdict, phrase in phrases.items():
        names = [titles[name] for name, found in against.items() if found.verdict == verdict]
        lines.append(phrase.format(titles[reference], ", ".join(names) or "none"))
    return lines


def markdown(
    chosen: Sequence[Contestant],
    results: Results,
    reference: str,
    record: Record,
    command: str,
) -> str:
    rows = table(chosen, results, reference)
    bars = ["|" + "|".join(["---", *["---:"] * (len(rows[0]) - 1)]) + "|"]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    first = next(iter(results.values()))
    seeds = sorted(first)
    setting = record.setting
    return "\n".join(
        [
            "# Few, noisy digits",
            "",
            f"    {command}",
            "",
            f"{datetime.date.today().isoformat()}; {machine()}. {len(seeds)} seeds "
            f"({', '.join(map(str, seeds))}); {setting['training_images']} images to train on, "
            f"{first[seeds[0]].samples} to test on ({setting['tested_on']}), noise of standard "
            f"deviation {setting['noise']} on both, shifts of up to {setting['shift']} pixel "
            f"while training. All models: {setting['epochs']} epochs, AdamW with learning rate "
            f"{setting['learning_rate']:g}, batches of {setting['batch_size']}, gradient rule "
            f"{setting['gradient_rule']}, tolerance {setting['training_tolerance']:g} in training "
            f"and {setting['evaluation_tolerance']:g} in evaluation. How these were chosen: "
            "[studies](../studies.md).",
            "",
            "![Accuracies and paired differences](noisy-digits.png)",
            "",
            lines[0],
            *bars,
            *lines[1:],
            "",
            "Mean ± standard deviation over the seeds. Differences are taken seed by seed, on the "
            "same images; the interval is Student's for their mean, and no correction is made for "
            "the number of comparisons. The models are of unlike size. CPU seconds of training; "
            "iterations and converged samples in evaluation.",
            "",
            *[f"- {line}" for line in findings(chosen, results, reference)],
            "",
        ]
    )


@drawing()
def figure(chosen: Sequence[Contestant], results: Results, reference: str, path: Path) -> None:
    """Left the accuracies, a dot a seed; right the paired differences with their intervals."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.4, 0.34 * len(chosen) + 1.1), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    rows = list(range(len(chosen)))
    against = differences(results, reference)
    for row, contestant in zip(rows, chosen, strict=True):
        runs = list(results[contestant.name].values())
        scores = [100 * run.accuracy for run in runs]
        _dots(left, row, scores, LIGHT.first)
        if contestant.name == reference:
            continue
        difference = against[contestant.name]
        values = [100 * value for value in difference.values]
        _dots(right, row, values, LIGHT.second)
        if len(values) > 1:
            low, high = difference.interval
            right.plot([100 * low, 100 * high], [row, row], color=LIGHT.ink, linewidth=1.4)
    labels = [
        f"{c.title} ({next(iter(results[c.name].values())).parameters / 1000:.0f} k)"
        for c in chosen
    ]
    left.set_yticks(rows, labels)
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set(xlabel="test accuracy (%)", title="accuracy: a dot a seed, bar: mean")
    title = next(c.title for c in chosen if c.name == reference)
    right.axvline(0, color=LIGHT.third, linewidth=1)
    right.set(xlabel=f"minus {title} (percentage points)")
    right.set_title("differences, 95 % interval")
    for axes in (left, right):
        plain_axis(axes, "x")
        dress_axes(axes)
    write_atomically(path, figure_png(drawn))


def _dots(axes: Any, row: int, values: Sequence[float], color: str) -> None:
    """A dot a seed, and their mean."""
    axes.plot(values, [row] * len(values), "o", color=color, alpha=0.45, markeredgewidth=0)
    axes.plot(mean(values), row, "|", color=LIGHT.ink, markersize=13, markeredgewidth=2)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m studies.noisy_digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("."), help="where the files go")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: the whole family")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 to 6")
    parser.add_argument("--reference", default=REFERENCE, metavar="NAME")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument(
        "--validate",
        action="store_true",
        help="choose settings: test on training images that were not drawn, other seeds",
    )
    options = parser.parse_args(arguments)
    if options.seeds is None:
        options.seeds = list(VALIDATION_SEEDS if options.validate else SEEDS)
    options.seeds = list(dict.fromkeys(options.seeds))
    try:
        options.chosen = contestants(options.models)
        if options.reference not in [c.name for c in options.chosen]:
            raise ValueError(
                f"the reference {options.reference!r} is not among the models: add it to --models, "
                "or choose another with --reference"
            )
        options.output.mkdir(parents=True, exist_ok=True)
        setting = setting_of(options.epochs, options.learning_rate, options.validate)
        options.record = Record(options.output / "noisy-digits.json", setting)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    import sys

    torch.set_num_threads(1)
    options = parse(arguments)
    chosen, record = options.chosen, options.record
    console = Console(highlight=False, soft_wrap=True)
    if options.models is None and left_out():
        console.print(f"Left out: {', '.join(left_out())}")
    data = load_digits()
    wanted = [(seed, c) for seed in options.seeds for c in chosen if not record.has(c.name, seed)]
    display = Display(console, len(wanted))
    with display.running():
        for seed, contestant in wanted:
            training, test = draw(data, seed, validate=options.validate)
            settings = TrainingSettings(
                epochs=options.epochs,
                batch_size=BATCH_SIZE,
                learning_rate=options.learning_rate,
                weight_decay=WEIGHT_DECAY,
                seed=seed,
            )
            title = f"seed {seed}, {contestant.title}"
            run = fit(
                contestant,
                training,
                test,
                settings,
                augmentation=AUGMENTATION,
                on_step=display.follow(title),
            )
            record.add(run)
            display.finish_run()
            console.print(f"{title}: {run.accuracy:.2%} in {run.seconds:.1f} s of CPU")
    results = record.results(chosen, options.seeds)
    console.print()
    console.print(aligned(table(chosen, results, options.reference)))
    console.print()
    for line in findings(chosen, results, options.reference):
        console.print(line)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "studies.noisy_digits", *given])
    text = markdown(chosen, results, options.reference, record, command)
    write_atomically(options.output / "noisy-digits.md", text.encode())
    figure(chosen, results, options.reference, options.output / "noisy-digits.png")
    console.print(f"\nwrote {options.output / 'noisy-digits'}.json, .md and .png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
