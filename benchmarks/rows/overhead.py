"""Overhead of solvers: time per evaluation ÷ time of the bare map.

The bare map is y ← T(y) in a loop, computed by the cell or written by hand, in either memory
format; the fastest version counts. No solver can reach its tolerance, so all make the same number
of evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import equilibria as eq
from benchmarks import ours, peer
from benchmarks.contest import Settings, quiet_solves
from benchmarks.problems import Problem
from benchmarks.results import Overhead
from benchmarks.rows import forward
from benchmarks.rows.row import Row
from benchmarks.timing import interleaved_medians

EVALUATIONS = 20
NEVER = eq.solvers.RelativeResidual(1e-300)
"""Stopping criterion that rounding never reaches."""
AIMS = {"anderson": 1.3, "accelerated": 1.15}


def measure(make: Callable[[Settings], Problem], settings: Settings) -> Iterator[Overhead]:
    problem = make(settings)
    runs: dict[tuple[str, str], Callable[[], int]] = dict(_bare_maps(problem))
    runs |= {(ours.NAME, name): _our_run(problem, name) for name in _iterating_solvers()}
    if peer.is_installed():
        runs |= {(peer.NAME, name): _peer_run(problem, name) for name in peer.TUNED_OPTIONS}
    with quiet_solves():
        evaluations = {key: run() for key, run in runs.items()}
        medians = interleaved_medians(
            {repr(key): run for key, run in runs.items()}, settings.repeats
        )
    cost = {key: medians[repr(key)] / evaluations[key] for key in runs}
    bare = min(seconds for (library, _), seconds in cost.items() if library == "bare")
    for (library, solver), seconds in cost.items():
        if library != "bare":
            yield Overhead(
                row=f"{problem.name}, cost per evaluation",
                topic="overhead",
                library=library,
                solver=solver,
                bare=1e3 * bare,
                ratio=seconds / bare,
                aim=AIMS.get(solver) if library == ours.NAME else None,
            )


def _iterating_solvers() -> list[str]:
    """Names of all solvers except descent, which searches among rounding errors here."""
    return [name for name in eq.solvers.list_solvers() if name != "descent"]


def _bare_maps(problem: Problem) -> Iterator[tuple[tuple[str, str], Callable[[], int]]]:
    formats = {"contiguous": torch.contiguous_format}
    if problem.is_image:
        formats["channels_last"] = torch.channels_last
    for name, memory_format in formats.items():
        x = problem.x.contiguous(memory_format=memory_format)
        yield ("bare", name), partial(_iterate, problem.cell, x)
        if problem.by_hand is not None:
            yield ("bare", f"{name}, by hand"), partial(_iterate_by_hand, problem.by_hand, x)


@torch.no_grad()
def _iterate(cell: eq.Cell, x: Tensor) -> int:
    context = cell.inject(x)
    state = cell.initial_state(x, context)
    for _ in range(EVALUATIONS):
        state = cell.step(state, context)
    return EVALUATIONS


@torch.no_grad()
def _iterate_by_hand(by_hand: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> int:
    state = torch.zeros_like(x)
    for _ in range(EVALUATIONS):
        state = by_hand(state, x)
    return EVALUATIONS


def _our_run(problem: Problem, name: str) -> Callable[[], int]:
    solver = eq.solvers.get_solver(name, stop=NEVER, max_iterations=EVALUATIONS)
    layer = eq.EquilibriumLayer(cell=problem.cell, solver=solver)
    # In evaluation mode the first failure would warn; all solves here run out of iterations.
    layer.train()
    return lambda: layer.solve(problem.x).evaluations


def _peer_run(problem: Problem, name: str) -> Callable[[], int]:
    layout = "pixels_first" if problem.is_image else "contiguous"
    setting = peer.Setting(
        solver=name, tolerance=0.0, tuned=True, layout=layout, max_iterations=EVALUATIONS
    )
    contestant = peer.Peer(problem, setting)

    def run() -> int:
        contestant.meter.reset()
        contestant.solve()
        return contestant.meter.forward

    return run


def _row(make: Callable[[Settings], Problem]) -> Row:
    about = f"time per evaluation of every solver ÷ the bare map: {make.__name__}"
    return Row(f"overhead-{make.__name__}", about, partial(measure, make), needs_peer=False)


ROWS = (_row(forward.dense), _row(forward.conv))
