"""How a row is fought: each side tries its candidates, and the best meet in interleaved runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import equilibria as eq
from benchmarks.results import Measured
from benchmarks.timing import Meter, TooSlow, cpu_seconds, interleaved_medians

SLACK = 1.01
"""What rounding may add to an error before it counts as missed."""

FINALISTS = 2
"""How many candidates of a side are timed to the end: one trial alone may mislead."""


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    quick: bool = False
    repeats: int = 7
    seed: int = 0
    """Of weights and inputs; a run averages over several."""
    budget: float = 120.0
    """Seconds of CPU time that the timing of one row may take before it makes fewer rounds."""

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Candidate:
    """One way to do what a row asks for."""

    label: Callable[[], str]
    """What to call it, once it has run."""
    run: Callable[[], Any]
    """What is timed."""
    error: Callable[[Any], float]
    """An independent check of what `run` returned."""
    evaluations: Callable[[], int]
    """How many evaluations the last run took."""
    meter: Meter | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """What one run of a candidate showed."""

    candidate: Candidate
    label: str
    seconds: float
    error: float
    evaluations: int
    reached: bool


Ladder = Sequence[Candidate]
"""Candidates from the cheapest to the dearest: the first that reaches the error is the one."""


def fight(
    sides: Mapping[str, Sequence[Ladder]], wanted: float, settings: Settings
) -> dict[str, Measured]:
    """The best of each side, timed in turns."""
    with quiet_solves():
        finalists = {name: choose(ladders, wanted) for name, ladders in sides.items()}
        runs = {
            f"{name} {number}": trial.candidate.run
            for name, trials in finalists.items()
            for number, trial in enumerate(trials)
        }
        # The trials have warmed up whatever there is.
        medians = interleaved_medians(runs, settings.repeats, warm_up=0, budget=settings.budget)
    found = {}
    for name, trials in finalists.items():
        seconds = [medians[f"{name} {number}"] for number in range(len(trials))]
        best = min(range(len(trials)), key=seconds.__getitem__)
        found[name] = measured(trials[best], seconds[best])
    return found


def choose(ladders: Sequence[Ladder], wanted: float) -> list[Trial]:
    """The fastest trials that reach the error; if none does, the one that came nearest."""
    trials: list[Trial] = []
    for ladder in ladders:
        fastest = min((trial.seconds for trial in trials if trial.reached), default=None)
        allowance = None if fastest is None else 2 * fastest + 0.05
        trials += climb(ladder, wanted, allowance)
    reached = sorted((trial for trial in trials if trial.reached), key=lambda t: t.seconds)
    return reached[:FINALISTS] or [min(trials, key=lambda t: t.error)]


def climb(ladder: Ladder, wanted: float, allowance: float | None) -> list[Trial]:
    """Trials that find, by bisection, the first rung of a ladder that reaches the error."""
    trials = []
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        trial = attempt(ladder[middle], wanted, allowance)
        if trial is not None:
            trials.append(trial)
        # A rung that takes too long ends the search above it as one that suffices does.
        if trial is None or trial.reached:
            high = middle
        else:
            low = middle + 1
    return trials


def attempt(candidate: Candidate, wanted: float, allowance: float | None = None) -> Trial | None:
    """One run of a candidate, checked; None if it took more than its allowance."""
    if candidate.meter is not None:
        candidate.meter.reset(allowance)
    results: list[Any] = []
    try:
        seconds = cpu_seconds(lambda: results.append(candidate.run()))
    except TooSlow:
        return None
    finally:
        if candidate.meter is not None:
            candidate.meter.lift()
    evaluations = candidate.evaluations()
    error = candidate.error(results[0])
    return Trial(
        candidate=candidate,
        label=candidate.label(),
        seconds=seconds,
        error=error,
        evaluations=evaluations,
        reached=error <= SLACK * wanted,
    )


def measured(trial: Trial, seconds: float) -> Measured:
    return Measured(
        label=trial.label,
        value=1e3 * seconds,
        evaluations=trial.evaluations,
        error=trial.error,
        reached=trial.reached,
        details=dict(trial.candidate.details),
    )


@contextmanager
def quiet_solves() -> Iterator[None]:
    """No warning of a solve that did not converge: the checks find it and the table shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        yield
