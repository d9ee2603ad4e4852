"""Run one training step in a separate process and print its peak memory as JSON.

    python -m benchmarks.memory_probe CONTESTANT CHANNELS SIZE BATCH

CONTESTANT is `ours:SOLVER` or `peer:GRADIENT` (ift or hook_ift, with fixed-point iteration).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import checks, ours, peer, problems
from benchmarks.peak import peak_mebibytes
from benchmarks.problems import Problem

TOLERANCE = 1e-3
NORM = 0.9


def main(arguments: list[str]) -> None:
    contestant, channels, size, batch = arguments[0], *map(int, arguments[1:])
    torch.set_num_threads(1)
    # A small step first, so that one-time allocations of libraries do not count.
    make_step(contestant, problems.conv(channels=4, size=8, batch=2, norm=NORM))()
    problem = problems.conv(channels=channels, size=size, batch=batch, norm=NORM)
    step = make_step(contestant, problem)
    states: list[Tensor] = []
    mebibytes = peak_mebibytes(lambda: states.append(step()))
    error = checks.relative_residual(problem.cell, problem.x, states[0])
    print(json.dumps({"mebibytes": mebibytes, "error": error}))


def make_step(contestant: str, problem: Problem) -> Callable[[], Tensor]:
    """Return a function that runs forward and backward and returns the equilibrium."""
    library, choice = contestant.split(":")
    equilibrium: Callable[[Tensor], Tensor]
    if library == "ours":
        equilibrium = ours.layer(
            problem.cell, tolerance=TOLERANCE, backward_tolerance=TOLERANCE, solver=choice
        ).train()
    else:
        setting = peer.Setting(
            tolerance=TOLERANCE,
            stop="rel",
            backward_tolerance=TOLERANCE,
            backward_stop="rel",
            gradient=choice,
        )
        equilibrium = peer.Peer(problem, setting).equilibrium

    def step() -> Tensor:
        state = equilibrium(problem.x)
        (0.5 * state.square().mean()).backward()
        return state.detach()

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
