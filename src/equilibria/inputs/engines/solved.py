"""Baseline engines, which solve for z and μ at every x."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equilibria.inputs.engines.base import Engine, EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.registry import check_at_least_one, check_tolerances


@dataclass(frozen=True, kw_only=True)
class SolvedEngine(Engine):
    """Engine of projected gradient or Adam steps of the input x, with solves at every x.

    The solves are those for the equilibrium z and its adjoint μ.

    Args:
        warm: Start each solve at the result of the previous step.
        inner_tolerance: Relative residual of the solves.
        inner_iterations: Limit of the iterations of the solves; None uses the layer's for z and 200
            for μ.

    The other arguments are those of `Engine`.
    """

    warm: bool = False
    inner_tolerance: float = 1e-3
    inner_iterations: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tolerances(inner_tolerance=self.inner_tolerance)
        check_at_least_one(inner_iterations=self.inner_iterations)

    def begin(self, problem: InputProblem, sweeps: int) -> SolvedRun:
        return SolvedRun(self, problem, sweeps)


@dataclass
class SolvedRun(EngineRun[SolvedEngine]):
    """State of one search with a `SolvedEngine`."""

    def start(self, fixed: FixedInput, z: Tensor | None) -> Tensor:
        """Return `z` or zeros; `update` solves anyway."""
        return self.problem.packing.pack(self.problem.zero_state) if z is None else z

    def update(
        self, fixed: FixedInput, current: JointIterate, *, first: bool
    ) -> tuple[JointIterate, JointEvaluation]:
        warm, tolerance = self.engine.warm, self.engine.inner_tolerance
        limit = self.engine.inner_iterations
        z = self._solved(fixed, current.z if warm else None, tolerance, limit)
        linear = JointLinearization(fixed, z)
        start = current.mu if warm else None
        mu = linear.solve_adjoint(start, tolerance=tolerance, max_iterations=limit or 200).value
        return JointIterate(z, mu, current.x), linear.evaluation(mu)
