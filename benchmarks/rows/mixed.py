"""Time to bring every sample to 1e-4 if one sample of the batch is hard."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import problems
from benchmarks.contest import Settings
from benchmarks.results import Duel
from benchmarks.rows.forward import solve_duel
from benchmarks.rows.row import Row

TOLERANCE = 1e-4


def measure(settings: Settings) -> Iterator[Duel]:
    problem = problems.mixed(
        channels=settings.size(32, 8),
        size=settings.size(32, 12),
        batch=32,
        norm=0.99,
        seed=settings.seed,
    )
    yield solve_duel(
        problem,
        TOLERANCE,
        settings,
        row="mixed batch, 1 of 32 hard, to 1e-04",
        topic="mixed",
        aim_default=0.12,
    )


ROWS = (Row("mixed", "forward to 1e-4: 1 of 32 samples hard, the others easy", measure),)
