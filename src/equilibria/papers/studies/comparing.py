"""Studies that decide claims of the papers, each by models compared with paired seeds.

    equilibria reproduce hhd --quick --seeds 8   # eight seeds, 8×8 images
    equilibria reproduce hhd                     # many more images, of 16×16

Models of equal size are trained on small images of Fashion-MNIST until their validation curves are
flat, and compared with paired seeds (docs/results.md). Every finished run is kept in OUTPUT/runs.
An interrupted command continues there, more seeds extend the existing ones, and studies share runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import equilibria as eq
from equilibria.data import load_dataset
from equilibria.papers.runner import RUNS
from equilibria.papers.studies.claims import CLAIM_STUDIES, ClaimStudy, Comparison, Value
from equilibria.papers.studies.fitting import Progress
from equilibria.papers.studies.measures import MEASURES
from equilibria.papers.studies.paired import Answer, Difference, deviation
from equilibria.papers.studies.protocol import (
    FULL,
    QUICK,
    ContestantRun,
    Follow,
    Protocol,
    Runs,
    check_matched,
)
from equilibria.papers.studies.study import Study, StudyOutcome, Work, markdown_table
from equilibria.training.metrics import StepProgress

LADDER_RUNS = 3
"""Smallest number of learning rates that are tried for each model."""


@dataclass(frozen=True)
class Finding:
    """Result of a comparison, in the units of tables.

    Attributes:
        claim: The claim, as text.
        answer: Whether it holds.
        difference: Mean difference over the seeds.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        seeds: Number of seeds.
        deviation: Standard deviation of the difference.
        margin: Smallest relevant difference.
        seeds_needed: Number of seeds that would decide the claim.
        hours_needed: Core-hours for that number of seeds.
    """

    claim: str
    answer: Answer
    difference: float
    low: float
    high: float
    seeds: int
    deviation: float
    margin: float
    seeds_needed: int
    hours_needed: float

    @property
    def verdict(self) -> str:
        if self.answer != "undecided":
            return self.answer
        return f"{self.answer} (needs {self.hours_needed:.1f} core-hours)"


Results = dict[str, list[ContestantRun]]
"""Runs by the name of a model, one per seed."""


def planned_runs(study: ClaimStudy, seeds: Sequence[int]) -> int:
    """Return the number of training runs of a study."""
    return len(study.contestants) * (len(seeds) + LADDER_RUNS)


def compared(study: ClaimStudy, seeds: Sequence[int], runs: Runs, progress: Progress) -> Results:
    """Return all runs of a study; finished ones are read from the folder."""
    check_sizes(study, runs)
    follow = _EpochReporter(progress, runs.protocol.most_epochs)
    results: Results = {contestant.name: [] for contestant in study.contestants}
    rates = {contestant.name: runs.rate(contestant, follow) for contestant in study.contestants}
    for seed in seeds:
        for contestant in study.contestants:
            run = runs.run(contestant, seed, rates[contestant.name], follow)
            for name in _measures_of(study, contestant.name):
                run = runs.measured(contestant, run, name, MEASURES[name])
            results[contestant.name].append(run)
            progress.finish_run()
    return results


def check_sizes(study: ClaimStudy, runs: Runs) -> None:
    """Check that the contestants have matching parameter counts."""
    channels, classes = runs.test.images.shape[1], runs.data.num_classes
    counts = {}
    for contestant in study.contestants:
        model = contestant.build(in_channels=channels, num_classes=classes)
        counts[contestant.name] = eq.models.registry.parameter_count(model)
    check_matched(counts)


def _measures_of(study: ClaimStudy, contestant: str) -> list[str]:
    """Return the measures of a model besides its accuracy."""
    names = [value.measure for value in study.values if value.contestant.name == contestant]
    return list(dict.fromkeys(name.partition(".")[0] for name in names if "." in name))


@dataclass(frozen=True)
class _EpochReporter:
    """Creates callbacks that report every epoch."""

    progress: Progress
    epochs: int

    def __call__(self, title: str) -> Follow:
        on_step = self.progress.follow(title)

        def on_epoch(epoch: int, _: float) -> None:
            on_step(StepProgress(epoch=epoch, step=epoch, steps=self.epochs, loss=torch.zeros(())))

        return on_epoch


def number(run: ContestantRun, measure: str) -> float:
    """Return a measured number of a trained model.

    Args:
        run: The model, trained with one seed.
        measure: "accuracy", or the name of an additional measure.
    """
    value = run.accuracy if measure == "accuracy" else run.measures[measure]
    assert value is not None
    return value


def cost(run: ContestantRun, values: Iterable[Value]) -> float:
    """Return the CPU seconds of a run, including the measures that the values need."""
    needed = {v.measure.partition(".")[0] for v in values if v.contestant.name == run.name}
    spent = (run.measures.get(f"{name}.seconds", 0.0) for name in needed)
    return run.seconds + sum(spent)


def find(comparison: Comparison, results: Results) -> Finding:
    """Evaluate a comparison over the seeds of both contestants."""

    def scores(value: Value) -> dict[int, float]:
        return {
            run.seed: comparison.scale * number(run, value.measure)
            for run in results[value.contestant.name]
        }

    difference = Difference.between(scores(comparison.above), scores(comparison.below))
    values = (comparison.above, comparison.below)
    names = {value.contestant.name for value in values}
    seconds = sum(cost(run, values) for name in names for run in results[name])
    count, margin = len(difference.values), comparison.scale * comparison.margin
    needed = difference.seeds_needed(margin)
    low, high = difference.interval
    return Finding(
        claim=comparison.claim,
        answer=difference.answer(margin),
        difference=difference.mean,
        low=low,
        high=high,
        seeds=count,
        deviation=difference.deviation,
        margin=margin,
        seeds_needed=needed,
        hours_needed=needed * seconds / count / 3600,
    )


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a study that decides claims.

    Args:
        quick: Train on 1,000 images of 8×8; otherwise on 20,000 images of 16×16, for many hours.
        seeds: Number of paired seeds, at least 2.
        root: Folder of the data sets.
    """

    quick: bool = False
    seeds: int = 6
    root: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(
                f"seeds must be at least 2 for an interval, got {self.seeds}: raise --seeds"
            )


def carry_out(study: ClaimStudy, settings: ComparisonSettings, work: Work) -> StudyOutcome:
    """Train the missing runs, and compare the models with paired seeds."""
    torch.set_num_threads(1)
    protocol = QUICK if settings.quick else FULL
    folder = work.output / RUNS / ("claims-quick" if settings.quick else "claims")
    runs = Runs(folder, load_dataset(protocol.data, root=settings.root), protocol)
    seeds = range(settings.seeds)
    results = compared(study, seeds, runs, Progress(work, planned_runs(study, seeds)))
    return summary(study, results, protocol)


def summary(study: ClaimStudy, results: Results, protocol: Protocol) -> StudyOutcome:
    """Evaluate all comparisons, and write their tables."""
    findings = [find(comparison, results) for comparison in study.comparisons]
    all_runs = [run for runs in results.values() for run in runs]
    minutes = sum(cost(run, study.values) for run in all_runs) / 60
    capped = sum(not run.flat for run in all_runs)
    rows = [["claim", "verdict", "difference", "95 % interval", "n"]]
    for finding in findings:
        rows.append(
            [
                finding.claim,
                finding.verdict,
                f"{finding.difference:+.2f}",
                f"[{finding.low:+.2f}, {finding.high:+.2f}]",
                str(finding.seeds),
            ]
        )
    return StudyOutcome(
        data={
            "protocol": asdict(protocol),
            "core_minutes": minutes,
            "findings": [{**asdict(finding), "verdict": finding.verdict} for finding in findings],
            "runs": [asdict(run) for run in all_runs],
        },
        text="\n".join(
            [
                *markdown_table(rows),
                "",
                *markdown_table(_models(study, results)),
                "",
                "Mean ± standard deviation over the seeds; accuracies in percent, their "
                "differences in points.",
            ]
        ),
        about=f"{minutes:.1f} core-minutes, without the choice of the learning rates. "
        f"{capped} of {len(all_runs)} runs reached the limit of epochs. "
        "[How a claim is decided](../results.md#how-a-claim-is-decided).",
    )


def studies() -> list[Study]:
    """Return one study per entry of `claims.CLAIM_STUDIES`."""
    return [
        Study(study.name, study.paper, study.title, ComparisonSettings, partial(carry_out, study))
        for study in CLAIM_STUDIES.values()
    ]


def claims_table(folder: Path, studies: Iterable[ClaimStudy]) -> str:
    """Return a Markdown table of the claims in the quick records of a folder.

    Args:
        folder: Folder with the records.
        studies: Studies to list; those without a record are omitted.
    """
    rows = [["claim", "verdict", "difference, 95 % interval", "n", "core-minutes", "command"]]
    for study in studies:
        file = folder / f"{study.name}-quick.json"
        if not file.exists():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        for number, finding in enumerate(content["findings"]):
            span = f"{finding['difference']:+.2f} [{finding['low']:+.2f}, {finding['high']:+.2f}]"
            claim = f"[{finding['claim']}]({folder.name}/{file.stem}.md)"
            row = [claim, f"**{finding['verdict']}**", span, str(finding["seeds"])]
            row += [f"{content['core_minutes']:.1f}", f"`{content['command']}`"]
            rows.append(row if number == 0 else [*row[:4], "", ""])
    return "\n".join(markdown_table(rows)) + "\n"


def _models(study: ClaimStudy, results: Results) -> list[list[str]]:
    """Return one row per model: size, learning rate, epochs and all measures."""
    measures = list(dict.fromkeys(value.measure for value in study.values))
    measures = list(dict.fromkeys(["accuracy", *measures]))
    scales = {value.measure: c.scale for c in study.comparisons for value in (c.above, c.below)}
    titles = [name.partition(".")[2] or name for name in measures]
    rows = [["model", "parameters", "learning rate", "epochs", *titles, "CPU s per run"]]
    for contestant in study.contestants:
        runs = results[contestant.name]
        epochs = [float(run.epochs) for run in runs]
        cells = [contestant.title, f"{runs[0].parameters:,}", f"{runs[0].rate:g}"]
        cells.append(f"{_mean(epochs):.0f}")
        for measure in measures:
            if not all(measure == "accuracy" or measure in run.measures for run in runs):
                cells.append("–")
                continue
            values = [scales.get(measure, 100.0) * number(run, measure) for run in runs]
            cells.append(f"{_mean(values):.2f} ± {deviation(values):.2f}")
        rows.append([*cells, f"{_mean([cost(run, study.values) for run in runs]):.0f}"])
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
