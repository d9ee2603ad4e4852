"""Comparison of the sides of a row: each tries its candidates; the fastest are timed in turns."""

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
"""Factor of the target error within which rounding is tolerated."""

FINALISTS = 2
"""Candidates per side in the final timing, because the time of a single trial is noisy."""


@dataclass(frozen=True)
class Settings:
    """Settings from the command line."""

    quick: bool = False
    repeats: int = 7
    seed: int = 0
    """Seed of weights and inputs. A run averages over several seeds."""
    budget: float = 120.0
    """CPU seconds for the timing of one row. Slow rows get fewer rounds."""

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Candidate:
    """One way to solve the problem of a row."""

    label: Callable[[], str]
    """Name, available after a run."""
    run: Callable[[], Any]
    """The timed function."""
    error: Callable[[Any], float]
    """Independent check of the result of `run`."""
    evaluations: Callable[[], int]
    """Number of evaluations in the last run."""
    meter: Meter | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """Result of one run of a candidate."""

    candidate: Candidate
    label: str
    seconds: float
    error: float
    evaluations: int
    reached: bool


Ladder = Sequence[Candidate]
"""Candidates from the cheapest to the most expensive. The first that reaches the error is used."""


def compare(
    sides: Mapping[str, Sequence[Ladder]], target: float, settings: Settings
) -> dict[str, Measured]:
    """Time the best candidates of each side in turns and return the best result of each.

    Args:
        sides: Ladders of candidates for each side.
        target: Error that a candidate must reach.
        settings: Number of rounds and time budget.
    """
    with quiet_solves():
        finalists = {name: choose(ladders, target) for name, ladders in sides.items()}
        runs = {
            f"{name} {number}": trial.candidate.run
            for name, trials in finalists.items()
            for number, trial in enumerate(trials)
        }
        # The trials were the warm-up.
        medians = interleaved_medians(runs, settings.repeats, warm_up=0, budget=settings.budget)
    results = {}
    for name, trials in finalists.items():
        seconds = [medians[f"{name} {number}"] for number in range(len(trials))]
        best = min(range(len(trials)), key=seconds.__getitem__)
        results[name] = measured(trials[best], seconds[best])
    return results


def choose(ladders: Sequence[Ladder], target: float) -> list[Trial]:
    """Return the fastest trials that reach the error, or else the most accurate one."""
    trials: list[Trial] = []
    for ladder in ladders:
        fastest = min((trial.seconds for trial in trials if trial.reached), default=None)
        allowance = None if fastest is None else 2 * fastest + 0.05
        trials += climb(ladder, target, allowance)
    reached = sorted((trial for trial in trials if trial.reached), key=lambda t: t.seconds)
    return reached[:FINALISTS] or [min(trials, key=lambda t: t.error)]


def climb(ladder: Ladder, target: float, allowance: float | None) -> list[Trial]:
    """Find the first rung of a ladder that reaches the error by bisection; return all trials."""
    trials = []
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        trial = attempt(ladder[middle], target, allowance)
        if trial is not None:
            trials.append(trial)
        # Rungs above one that is too slow need not be tried either.
        if trial is None or trial.reached:
            high = middle
        else:
            low = middle + 1
    return trials


def attempt(candidate: Candidate, target: float, allowance: float | None = None) -> Trial | None:
    """Run and check a candidate once; return None if it used up its allowance."""
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
        reached=error <= SLACK * target,
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
    """Suppress warnings of failed solves. The checks detect failures and the table shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        yield
