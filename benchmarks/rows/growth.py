"""How the ratio grows with the size: a conv solve to 1e-4 along batch, channels, resolution."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import problems
from benchmarks.contest import Settings
from benchmarks.results import Duel
from benchmarks.rows.forward import solve_duel
from benchmarks.rows.row import Row

TOLERANCE = 1e-4
NORM = 0.95
CENTRE = {"batch": 32, "channels": 32, "size": 32}
POINTS = {"batch": (8, 32, 128), "channels": (16, 32, 64), "size": (16, 32, 64)}
QUICK_CENTRE = {"batch": 4, "channels": 8, "size": 8}
QUICK_POINTS = {"batch": (4, 8), "channels": (8, 16), "size": (8, 16)}


def measure(settings: Settings) -> Iterator[Duel]:
    center = QUICK_CENTRE if settings.quick else CENTRE
    points = QUICK_POINTS if settings.quick else POINTS
    seen: set[tuple[int, ...]] = set()
    for axis, values in points.items():
        for value in values:
            shape = {**center, axis: value}
            # The axes cross in one point: it is measured once.
            if tuple(shape.values()) in seen:
                continue
            seen.add(tuple(shape.values()))
            yield solve_duel(
                problems.conv(**shape, norm=NORM),
                TOLERANCE,
                settings,
                row="conv, batch {batch}, {channels} channels, {size}×{size}".format(**shape),
                topic="growth",
            )


ROWS = (Row("growth", "a conv solve to 1e-4 along batch, channels and resolution", measure),)
