"""Reliable timing: medians of CPU time, interleaved in one process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

MIN_ROUNDS = 3


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of one run over all threads, without garbage collection."""
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
    """Return the median CPU seconds of each contestant.

    The contestants take turns, so that other load on the machine affects all of them equally. CPU
    time does not count waiting for a core.

    Args:
        contestants: Functions to time, by name.
        repeats: Number of rounds; every round runs each contestant once.
        warm_up: Rounds that are not timed.
        budget: Seconds after which there are no more rounds, but at least three are run.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(warm_up):
        for run in contestants.values():
            run()
    spent = 0.0
    for round_number in range(repeats):
        if round_number >= MIN_ROUNDS and spent * (1 + 1 / round_number) > budget:
            break
        gc.collect()
        for name, run in contestants.items():
            times[name].append(cpu_seconds(run))
            spent += times[name][-1]
    return {name: statistics.median(values) for name, values in times.items()}


class TooSlow(Exception):  # noqa: N818 - an event, not an error
    """A trial used up its allowance, so another candidate is faster."""


class Meter:
    """Counter of evaluations and Jacobian products that ends slow trials."""

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0
        self._deadline: float | None = None

    def reset(self, allowance: float | None = None) -> None:
        """Count from zero; raise `TooSlow` once `allowance` seconds of CPU time have passed."""
        self.reset_counts()
        self._deadline = None if allowance is None else time.process_time() + allowance

    def lift(self) -> None:
        """Remove the allowance and keep the counts."""
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
