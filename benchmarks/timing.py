"""Timing that can be believed: one process, interleaved, medians of CPU time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping


def interleaved_medians(
    contestants: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 2
) -> dict[str, float]:
    """The median CPU time of each contestant in seconds.

    The contestants take turns, so that what else the machine does hits all of them alike, and CPU
    time rather than the clock is taken, so that waiting for a core does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(warm_up + repeats):
        for name, run in contestants.items():
            gc.collect()
            begin = time.process_time()
            run()
            elapsed = time.process_time() - begin
            if round_number >= warm_up:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}
