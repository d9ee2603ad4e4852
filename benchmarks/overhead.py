"""What a solver costs beyond the map it iterates: time per evaluation ÷ time of the bare map."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import equilibria as eq
from benchmarks.timing import interleaved_medians

EVALUATIONS = 20


@dataclass(frozen=True)
class Overhead:
    """One row of the table."""

    problem: str
    solver: str
    bare_milliseconds: float
    ratio: float


def dense_layer() -> tuple[eq.EquilibriumLayer, Tensor]:
    W = eq.Dense(256, 256, norm="bound", zeta=0.95)
    return eq.EquilibriumLayer(eq.Input(eq.Dense(256, 256)) + eq.Quadratic(W)), torch.randn(64, 256)


def convolutional_layer() -> tuple[eq.EquilibriumLayer, Tensor]:
    W = eq.Conv2d(32, 32, 3, norm="bound", zeta=0.95)
    energy = eq.Input(eq.Conv2d(32, 32, 3)) + eq.Quadratic(W)
    return eq.EquilibriumLayer(energy), torch.randn(32, 32, 32, 32)


PROBLEMS: dict[str, Callable[[], tuple[eq.EquilibriumLayer, Tensor]]] = {
    "dense 256, batch 64": dense_layer,
    "conv 32 channels, 32×32, batch 32": convolutional_layer,
}


def measure(repeats: int) -> list[Overhead]:
    rows = []
    for problem, make in PROBLEMS.items():
        torch.manual_seed(0)
        layer, x = make()
        with torch.no_grad():
            context = layer.cell.inject(x)
            start = layer.cell.initial_state(x, context)
        contestants: dict[str, Callable[[], object]] = {
            "the bare map": lambda layer=layer, start=start, context=context: _iterate(
                layer.cell, start, context
            )
        }
        for name in eq.list_solvers():
            # A tolerance out of reach: every solver makes the same number of evaluations.
            solver = eq.get_solver(name, tolerance=1e-30, max_iterations=EVALUATIONS)
            contestants[name] = lambda layer=layer, x=x, solver=solver: layer.solve(
                x, solver=solver
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.ConvergenceWarning)
            medians = interleaved_medians(contestants, repeats)
        bare = medians.pop("the bare map")
        rows += [
            Overhead(problem, name, 1e3 * bare / EVALUATIONS, seconds / bare)
            for name, seconds in medians.items()
        ]
    return rows


@torch.no_grad()
def _iterate(cell: eq.Cell, state: eq.State, context: eq.Context) -> eq.State:
    for _ in range(EVALUATIONS):
        state = cell.step(state, context)
    return state
