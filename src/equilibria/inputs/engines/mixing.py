"""Engines that extrapolate the joint iterates (z, μ, x) by Anderson's or Broyden's method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equilibria.inputs.engines.base import Engine, EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import InputProblem
from equilibria.solvers import AndersonTypeOne, Solver


@dataclass(frozen=True, kw_only=True)
class MixingEngine(Engine):
    """Engine whose joint iterates are extrapolated by a solver, such as Anderson's method.

    A joint iterate consists of equilibrium z, adjoint μ and input x.

    Args:
        mixing: The solver; None for plain iterates.
        mix_below: Residual below which a problem is mixed. Far from the optimum an extrapolated x
            is worse than a plain step; infinity mixes always.
        project_mixed: Project x after mixing. Otherwise every step is mixed, and the map is
            evaluated at the projection of x, which keeps the steps that Broyden's updates need.
    """

    mixing: Solver[Any] | None
    mix_below: float = 0.05
    project_mixed: bool = True

    def begin(self, problem: InputProblem, sweeps: int) -> MixingRun:
        return MixingRun(self, problem, sweeps)


@dataclass
class MixingRun(EngineRun[MixingEngine]):
    """State of one search with a `MixingEngine`."""

    def __post_init__(self) -> None:
        self.memory: Any = None
        """State of the mixing solver."""
        self.mixed: Tensor | None = None
        """Last proposal of the mixing solver, if it is not projected."""

    @property
    def residual_limit(self) -> float:
        return 0.0 if self.engine.mixing is None else self.engine.mix_below

    def restart(self, rows: Tensor, x: Tensor) -> None:
        self.memory = self.mixed = None

    def extrapolated(
        self, current: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        mixing, groups = self.engine.mixing, self.problem.groups
        if mixing is None:
            return updated
        point = (
            groups.join_all(current.z, current.mu, current.x) if self.mixed is None else self.mixed
        )
        image = groups.join_all(updated.z, updated.mu, updated.x)
        if self.memory is None:
            self.memory = mixing.begin(point)
        proposed = mixing.propose(self.memory, point, image, image - point)
        z, mu, x = groups.split_all(proposed, current.x.shape[1])
        mixed = JointIterate(z, mu, self.problem.region.project(x))
        if not self.engine.project_mixed:
            self.mixed = proposed
            return mixed
        return mixed.where(residual <= self.engine.mix_below, updated, groups)


def anderson(
    memory: int = 5, ridge: float = 1e-3, cap: float = 10.0, **options: Any
) -> MixingEngine:
    """Build an engine that mixes iterates by Anderson's method, type I, near the optimum.

    The method has a ridge and a cap on its weights.
    """
    return MixingEngine(mixing=AndersonTypeOne(memory=memory, ridge=ridge, cap=cap), **options)
