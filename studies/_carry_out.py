"""Carrying out a study: its runs, the differences, the verdicts, a JSON file and a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import equilibria as eq
from equilibria.papers import provenance
from equilibria.training import StepProgress, write_atomically
from studies._claims import Comparison, Study, Value
from studies._measures import MEASURES
from studies._paired import Answer, Difference, deviation
from studies._protocol import Follow, Run, Runs, check_matched
from studies._training import Display

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


Results = dict[str, list[Run]]
"""By the name of a model, a run a seed."""


def planned_runs(study: Study, seeds: Sequence[int]) -> int:
    return len(study.contestants) * (len(seeds) + LADDER_RUNS)


def carry_out(study: Study, seeds: Sequence[int], runs: Runs, display: Display) -> Results:
    """All runs of a study, those that the folder holds from there."""
    check_sizes(study, runs)
    follow = _Followed(display, runs.protocol.most_epochs)
    results: Results = {contestant.name: [] for contestant in study.contestants}
    rates = {contestant.name: runs.rate(contestant, follow) for contestant in study.contestants}
    for seed in seeds:
        for contestant in study.contestants:
            run = runs.run(contestant, seed, rates[contestant.name], follow)
            for name in _measures_of(study, contestant.name):
                run = runs.measured(contestant, run, name, MEASURES[name])
            results[contestant.name].append(run)
            display.finish_run()
    return results


def check_sizes(study: Study, runs: Runs) -> None:
    channels, classes = runs.test.images.shape[1], runs.data.num_classes
    counts = {}
    for contestant in study.contestants:
        model = contestant.build(in_channels=channels, num_classes=classes)
        counts[contestant.name] = eq.models.parameter_count(model)
    check_matched(counts)


def _measures_of(study: Study, contestant: str) -> list[str]:
    """What is measured of a model, besides its accuracy."""
    of_it = [value.measure for value in study.values if value.contestant.name == contestant]
    return list(dict.fromkeys(name.partition(".")[0] for name in of_it if "." in name))


@dataclass(frozen=True)
class _Followed:
    """Tells the display of every epoch."""

    display: Display
    epochs: int

    def __call__(self, title: str) -> Follow:
        on_step = self.display.follow(title)

        def on_epoch(epoch: int, _: float) -> None:
            on_step(StepProgress(epoch=epoch, step=epoch, steps=self.epochs, loss=torch.zeros(())))

        return on_epoch


def number(run: Run, measure: str) -> float:
    value = run.accuracy if measure == "accuracy" else run.measures[measure]
    assert value is not None
    return value


def cost(run: Run, values: Iterable[Value]) -> float:
    """CPU seconds of a run, with those of what is measured of it for these values."""
    wanted = {v.measure.partition(".")[0] for v in values if v.contestant.name == run.name}
    spent = (run.measures.get(f"{name}.seconds", 0.0) for name in wanted)
    return run.seconds + sum(spent)


def find(comparison: Comparison, results: Results) -> Finding:
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


def write(
    study: Study, results: Results, runs: Runs, command: str, folder: Path
) -> tuple[str, list[Finding]]:
    """NAME.json and NAME.md; the text and the findings."""
    findings = [find(comparison, results) for comparison in study.comparisons]
    content = {
        "study": study.name,
        "command": command,
        **provenance(),
        "protocol": asdict(runs.protocol),
        "core_minutes": sum(cost(run, study.values) for some in results.values() for run in some)
        / 60,
        "findings": [{**asdict(finding), "verdict": finding.verdict} for finding in findings],
        "runs": [asdict(run) for some in results.values() for run in some],
    }
    text = markdown(study, results, findings, content, command)
    write_atomically(folder / f"{study.name}.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / f"{study.name}.md", text.encode())
    return text, findings


def markdown(
    study: Study,
    results: Results,
    findings: Sequence[Finding],
    facts: dict[str, Any],
    command: str,
) -> str:
    everything = [run for some in results.values() for run in some]
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
    return "\n".join(
        [
            f"# {study.title}",
            "",
            f"    {command}",
            "",
            f"{study.paper}. {facts['date']}, commit {facts['commit']}; {facts['machine']}. "
            f"{facts['core_minutes']:.1f} core-minutes without the choice of the learning rates; "
            f"{capped} of {len(everything)} runs met the limit of epochs. How it is decided: "
            "[studies](../../studies.md#how-a-claim-is-decided).",
            "",
            *_table(rows),
            "",
            *_table(_models(study, results)),
            "",
            "Mean ± standard deviation over the seeds; accuracies in percent, their differences in "
            "points.",
            "",
        ]
    )


def claims_table(folder: Path, studies: Iterable[Study]) -> str:
    """The claims of those studies that are in a folder, a row each, for docs/studies.md."""
    rows = [["claim", "verdict", "difference, 95 % interval", "n", "core-minutes", "command"]]
    for study in studies:
        file = folder / f"{study.name}.json"
        if not file.exists():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        for number, found in enumerate(content["findings"]):
            span = f"{found['difference']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]"
            row = [f"[{found['claim']}](#{study.name})", f"**{found['verdict']}**", span]
            row += [
                str(found["seeds"]),
                f"{content['core_minutes']:.1f}",
                f"`{content['command']}`",
            ]
            rows.append(row if number == 0 else [*row[:4], "", ""])
    return "\n".join(_table(rows)) + "\n"


def _models(study: Study, results: Results) -> list[list[str]]:
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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    bars = "|" + "|".join(["---", *["---:"] * (len(rows[0]) - 1)]) + "|"
    first, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return [first, bars, *rest]
