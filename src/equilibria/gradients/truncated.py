"""Approximate gradients: a few steps of the map at the equilibrium, recorded by autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from equilibria.context import State, map_state
from equilibria.gradients.base import Backward, GradientRule, Map, needs_graph
from equilibria.solvers import FixedPointProblem, Solution, Solver


@dataclass(frozen=True)
class Phantom(GradientRule):
    """The phantom gradient (Geng et al., 2021): `steps` damped steps after the solve.

    y ← (1 − damping)·y + damping·T(y; x), recorded from y*. **Approximate**: the Neumann series of
    the implicit gradient cut after `steps` terms, with an error of (1 − damping + damping·q)^steps
    for a map of contraction q. Cheap, and no backward solve that can fail. Second derivatives are
    those of the truncated steps.
    """

    exact: ClassVar[bool] = False
    steps: int = 5
    damping: float = 0.8

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping must be in (0, 1], not {self.damping}")

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Solver[Any], backward: Backward
    ) -> tuple[State, Solution]:
        solution = solver.solve(problem)
        return _record_steps(cell, solution, self.steps, self.damping), solution


@dataclass(frozen=True)
class OneStep(GradientRule):
    """The gradient of one step of the map at the equilibrium (Fung et al., 2022, "JFB").

    **Approximate**: the inverse (I − J)⁻¹ of the implicit gradient is replaced by the identity. A
    descent direction for well-conditioned contractions, and as cheap as it gets.
    """

    exact: ClassVar[bool] = False

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Solver[Any], backward: Backward
    ) -> tuple[State, Solution]:
        solution = solver.solve(problem)
        return _record_steps(cell, solution, steps=1, damping=1.0), solution


def _record_steps(cell: Map, solution: Solution, steps: int, damping: float) -> State:
    state = solution.state
    if needs_graph(cell, solution.context):
        context = cell.simplify(solution.context)
        for _ in range(steps):
            image = cell.step(state, context)
            state = map_state(lambda y, mapped: y + damping * (mapped - y), state, image)
    return state
