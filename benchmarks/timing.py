"""Timing that can be believed: one process, interleaved, medians of CPU time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

FEWEST_ROUNDS = 3


def cpu_seconds(run: Callable[[], object]) -> float:
    """The CPU time of one run, all threads together, without pauses of the garbage collector."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        begin = time.process_time()
        run()
        return time.process_time() - begin
    finally:
        if enabled:
            gc.enable()


def interleaved_medians(
    contestants: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warm_up: int = 1,
    budget: float = 120.0,
) -> dict[str, float]:
    """The median CPU time of each contestant in seconds.

    The contestants take turns, so that what else the machine does hits all of them alike, and CPU
    time rather than the clock is taken, so that waiting for a core does not count. Every round is
    a run of each; where rounds are long, fewer than `repeats` (but at least three) fit into
    `budget` seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(warm_up):
        for run in contestants.values():
            run()
    spent = 0.0
    for round_number in range(repeats):
        if round_number >= FEWEST_ROUNDS and spent * (1 + 1 / round_number) > budget:
            break
        gc.collect()
        for name, run in contestants.items():
            times[name].append(cpu_seconds(run))
            spent += times[name][-1]
    return {name: statistics.median(values) for name, values in times.items()}


class TooSlow(Exception):  # noqa: N818 - an event, not a fault
    """A trial used up its allowance: another candidate is faster, whatever it does now."""


class Meter:
    """Counts evaluations of the map and products with its Jacobian, and ends hopeless trials."""

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self._deadline: float | None = None

    def reset(self, allowance: float | None = None) -> None:
        """Count from zero; raise `TooSlow` once `allowance` seconds of CPU time have passed."""
        self.reset_counts()
        self._deadline = None if allowance is None else time.process_time() + allowance

    def lift(self) -> None:
        """Take the allowance away, and keep the counts."""
        self._deadline = None

    def reset_counts(self) -> None:
        self.forward = self.backward = 0

    def count_forward(self) -> None:
        self.forward += 1
        self._check()

    def count_backward(self) -> None:
        self.backward += 1
        self._check()

    def _check(self) -> None:
        if self._deadline is not None and time.process_time() > self._deadline:
            raise TooSlow
