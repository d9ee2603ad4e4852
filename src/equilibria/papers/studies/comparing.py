"""Studies that decide claims of the papers, each by models compared with paired seeds.

    equilibria reproduce hhd --quick --seeds 8   # eight seeds, 8×8 images
    equilibria reproduce hhd                     # many more images, of 16×16

Models of one size are trained on small images of Fashion-MNIST until their validation curves are
flat, and compared seed by seed (docs/results.md). Every run is kept in OUTPUT/runs as soon as it is
finished: an interrupted command continues there, more seeds add to the existing ones, and studies
share runs.
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
from equilibria.papers.studies.study import Found, Study, Work, markdown_table
from equilibria.training.metrics import StepProgress

LADDER_RUNS = 3
"""At least so many rates are tried of each model."""


@dataclass(frozen=True)
class Finding:
    """What a comparison came to, in the numbers that are shown."""

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
    """Core-hours for so many seeds."""

    @property
    def verdict(self) -> str:
        if self.answer != "cannot be told here":
            return self.answer
        return f"{self.answer} (needs {self.hours_needed:.1f} core-hours)"


Results = dict[str, list[ContestantRun]]
"""By the name of a model, a run a seed."""


def planned_runs(study: ClaimStudy, seeds: Sequence[int]) -> int:
    """Return the number of training runs of a study."""
    return len(study.contestants) * (len(seeds) + LADDER_RUNS)


def compared(study: ClaimStudy, seeds: Sequence[int], runs: Runs, progress: Progress) -> Results:
    """All runs of a study, those that the folder holds from there."""
    check_sizes(study, runs)
    follow = _Followed(progress, runs.protocol.most_epochs)
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
    """What is measured of a model, besides its accuracy."""
    of_it = [value.measure for value in study.values if value.contestant.name == contestant]
    return list(dict.fromkeys(name.partition(".")[0] for name in of_it if "." in name))


@dataclass(frozen=True)
class _Followed:
    """Reports every epoch."""

    progress: Progress
    epochs: int

    def __call__(self, title: str) -> Follow:
        on_step = self.progress.follow(title)

        def on_epoch(epoch: int, _: float) -> None:
            on_step(StepProgress(epoch=epoch, step=epoch, steps=self.epochs, loss=torch.zeros(())))

        return on_epoch


def number(run: ContestantRun, measure: str) -> float:
    """Return a measure of a run."""
    value = run.accuracy if measure == "accuracy" else run.measures[measure]
    assert value is not None
    return value


def cost(run: ContestantRun, values: Iterable[Value]) -> float:
    """CPU seconds of a run, with those of what is measured of it for these values."""
    wanted = {v.measure.partition(".")[0] for v in values if v.contestant.name == run.name}
    spent = (run.measures.get(f"{name}.seconds", 0.0) for name in wanted)
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
class Settings:
    """Settings of a study that decides claims.

    Args:
        quick: 8×8 images, 1,000 to train on; otherwise 16×16 images and 20,000, many hours.
        seeds: Number of paired seeds, at least 2.
        root: Folder of the data sets.
    """

    quick: bool = False
    seeds: int = 6
    root: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(
                f"an interval needs at least two seeds, got {self.seeds}: raise --seeds"
            )


def carry_out(study: ClaimStudy, settings: Settings, work: Work) -> Found:
    """Train what is missing, and compare the models seed by seed."""
    torch.set_num_threads(1)
    protocol = QUICK if settings.quick else FULL
    folder = work.output / RUNS / ("claims-quick" if settings.quick else "claims")
    runs = Runs(folder, load_dataset(protocol.data, root=settings.root), protocol)
    seeds = range(settings.seeds)
    results = compared(study, seeds, runs, Progress(work, planned_runs(study, seeds)))
    return summary(study, results, protocol)


def summary(study: ClaimStudy, results: Results, protocol: Protocol) -> Found:
    """The findings with all runs, and their tables."""
    findings = [find(comparison, results) for comparison in study.comparisons]
    everything = [run for some in results.values() for run in some]
    minutes = sum(cost(run, study.values) for run in everything) / 60
    capped = sum(not run.flat for run in everything)
    rows = [["claim", "verdict", "difference", "95 % interval", "n"]]
    for found in findings:
        rows.append(
            [
                found.claim,
                found.verdict,
                f"{found.difference:+.2f}",
                f"[{found.low:+.2f}, {found.high:+.2f}]",
                str(found.seeds),
            ]
        )
    return Found(
        data={
            "protocol": asdict(protocol),
            "core_minutes": minutes,
            "findings": [{**asdict(finding), "verdict": finding.verdict} for finding in findings],
            "runs": [asdict(run) for run in everything],
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
        about=f"{minutes:.1f} core-minutes without the choice of the learning rates; "
        f"{capped} of {len(everything)} runs met the limit of epochs. How it is decided: "
        "[results](../results.md#how-a-claim-is-decided).",
    )


def studies() -> list[Study]:
    """Return one study per entry of `claims.CLAIM_STUDIES`."""
    return [
        Study(study.name, study.paper, study.title, Settings, partial(carry_out, study))
        for study in CLAIM_STUDIES.values()
    ]


def claims_table(folder: Path, studies: Iterable[ClaimStudy]) -> str:
    """Return a Markdown table of the claims that the quick records in a folder decide."""
    rows = [["claim", "verdict", "difference, 95 % interval", "n", "core-minutes", "command"]]
    for study in studies:
        file = folder / f"{study.name}-quick.json"
        if not file.exists():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        for number, found in enumerate(content["findings"]):
            span = f"{found['difference']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"
            claim = f"[{found['claim']}]({folder.name}/{file.stem}.md)"
            row = [claim, f"**{found['verdict']}**", span, str(found["seeds"])]
            row += [f"{content['core_minutes']:.1f}", f"`{content['command']}`"]
            rows.append(row if number == 0 else [*row[:4], "", ""])
    return "\n".join(markdown_table(rows)) + "\n"


def _models(study: ClaimStudy, results: Results) -> list[list[str]]:
    """A row a model: its size, rate and epochs, and every number that is compared."""
    measures = list(dict.fromkeys(value.measure for value in study.values))
    measures = list(dict.fromkeys(["accuracy", *measures]))
    scales = {value.measure: c.scale for c in study.comparisons for value in (c.above, c.below)}
    titles = [name.partition(".")[2] or name for name in measures]
    rows = [["model", "parameters", "learning rate", "epochs", *titles, "CPU s a run"]]
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
