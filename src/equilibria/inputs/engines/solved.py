"""The baselines: z and μ solved for at every x, as an ordinary gradient step would."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equilibria.inputs.engines.base import Engine, EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.registry import check_at_least_one, check_tolerances


@dataclass(frozen=True, kw_only=True)
class SolvedEngine(Engine):
    """Projected gradient or Adam steps at equilibria that are solved for.

    warm: start the solves where those of the last step ended; otherwise from nothing.
    inner_tolerance, inner_iterations: of the solves; None: the layer's limit.
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

    def start(self, here: FixedInput, z: Tensor | None) -> Tensor:
        """A solve follows: there is nothing to prepare."""
        return self.problem.packing.pack(self.problem.zero_state) if z is None else z

    def follow(
        self, here: FixedInput, now: JointIterate, *, first: bool
    ) -> tuple[JointIterate, JointEvaluation]:
        warm, tolerance = self.engine.warm, self.engine.inner_tolerance
        limit = self.engine.inner_iterations
        z = self._solved(here, now.z if warm else None, tolerance, limit)
        linear = JointLinearization(here, z)
        start = now.mu if warm else None
        mu = linear.solve_adjoint(start, tolerance=tolerance, max_iterations=limit or 200).value
        return JointIterate(z, mu, now.x), linear.evaluation(mu)
