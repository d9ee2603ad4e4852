"""Peak memory of a training step; each contestant runs in a separate process.

Compares our default solver and the one that needs the least memory with the peer's implicit
gradient and fixed-point iteration, the peer's solver that needs the least. The peer computes the
gradient in a Function (its default) or in a hook, which its documentation recommends for memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import ours
from benchmarks.contest import SLACK, Settings
from benchmarks.memory_probe import TOLERANCE
from benchmarks.results import Duel, Measured
from benchmarks.rows.row import Row

LEANEST = "accelerated"


def measure(settings: Settings) -> Iterator[Duel]:
    shape = (settings.size(32, 16), settings.size(64, 32), settings.size(64, 32))
    tuned = probe("peer:hook_ift", "fixed_point_iter, hook_ift", shape)
    default = probe("peer:ift", "fixed_point_iter, ift", shape)
    solvers = [ours.default_name("solver")]
    # Each process takes seconds to start.
    for solver in solvers if settings.quick else [*solvers, LEANEST]:
        yield Duel(
            row=f"training step, peak memory, {solver}",
            topic="memory",
            unit="MiB",
            wanted=TOLERANCE,
            ours=probe(f"ours:{solver}", solver, shape),
            tuned=tuned,
            default=default,
            aim_tuned=0.6,
            aim_default=0.45,
            details={"shape": list(shape)},
        )


def probe(contestant: str, label: str, shape: tuple[int, ...]) -> Measured:
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory_probe", contestant, *map(str, shape)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise RuntimeError(f"the memory probe of {contestant} failed:\n{answer.stderr}")
    result = json.loads(answer.stdout.splitlines()[-1])
    return Measured(
        label=label,
        value=result["mebibytes"],
        error=result["error"],
        reached=result["error"] <= SLACK * TOLERANCE,
    )


ROWS = (
    Row(
        "memory",
        "peak memory of a training step on a large convolution",
        measure,
        depends_on_seed=False,
    ),
)
