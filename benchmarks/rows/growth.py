"""Growth of time and memory with batch size, channels, and resolution of a convolution.

Measures the time of a solve to 1e-4, and the peak memory of a training step as in `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import problems
from benchmarks.contest import Settings
from benchmarks.results import Duel
from benchmarks.rows import memory
from benchmarks.rows.forward import solve_duel
from benchmarks.rows.row import Row

TOLERANCE = 1e-4
NORM = 0.95
CENTER = {"batch": 32, "channels": 32, "size": 32}
POINTS = {"batch": (8, 32, 128, 512), "channels": (16, 32, 64), "size": (16, 32, 64)}
QUICK_CENTER = {"batch": 4, "channels": 8, "size": 8}
QUICK_POINTS = {"batch": (4, 8), "channels": (8, 16), "size": (8, 16)}


def shapes(settings: Settings) -> Iterator[dict[str, int]]:
    """Yield the points of the axes. The point where they cross comes once."""
    center = QUICK_CENTER if settings.quick else CENTER
    points = QUICK_POINTS if settings.quick else POINTS
    seen: set[tuple[int, ...]] = set()
    for axis, values in points.items():
        for value in values:
            shape = {**center, axis: value}
            if tuple(shape.values()) in seen:
                continue
            seen.add(tuple(shape.values()))
            yield shape


def measure(settings: Settings) -> Iterator[Duel]:
    for shape in shapes(settings):
        problem = problems.conv(**shape, norm=NORM, seed=settings.seed)
        yield solve_duel(problem, TOLERANCE, settings, row=_name(shape), topic="growth")


def measure_memory(settings: Settings) -> Iterator[Duel]:
    # Each point takes three processes.
    for shape in list(shapes(settings))[: 2 if settings.quick else None]:
        sizes = (shape["channels"], shape["size"], shape["batch"])
        yield Duel(
            row=_name(shape),
            topic="growth-memory",
            unit="MiB",
            wanted=memory.TOLERANCE,
            ours=memory.probe("ours:auto", "auto", sizes),
            tuned=memory.probe("peer:hook_ift", "fixed_point_iter, hook_ift", sizes),
            default=memory.probe("peer:ift", "fixed_point_iter, ift", sizes),
        )


def _name(shape: dict[str, int]) -> str:
    return "conv, batch {batch}, {channels} channels, {size}×{size}".format(**shape)


ROWS = (
    Row("growth", "a conv solve to 1e-4 along batch, channels and resolution", measure),
    Row(
        "growth-memory",
        "peak memory of a training step along batch, channels and resolution",
        measure_memory,
        depends_on_seed=False,
    ),
)
