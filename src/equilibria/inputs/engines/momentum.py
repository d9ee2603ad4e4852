"""The engine of constrained inputs: Nesterov's momentum on the constraint, nothing a step old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.engines.base import FIRST_PULLS, Engine, EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.inputs.steps import Decay
from equilibria.registry import check_below_one, check_positive

MOST_EXTRA_SWEEPS = 5
"""For a step whose z or μ has fallen behind."""


@dataclass(frozen=True, kw_only=True)
class MomentumEngine(Engine):
    """x⁺ = Π(y − α g/‖g‖) from the extrapolated point y = x + β (x − x⁻), β the momentum.

    y stays within the bounds of a box, where the model may end, but not in the ball: to project
    it there would take most of the momentum away. At y one graph holds a sweep z⁺ = T(z; y),
    the loss at z⁺ and its slope s, and the pull-back that gives μ⁺ = Jᵀμ + s and g. Before it μ
    is renewed by what s has changed since the last step. So x, z and s are of the same moment,
    and only Jᵀ of the last step acts in μ. The length α falls as half a cosine: a line leaves too
    few steps to the shortest ones, and needs two steps in ten more.

    lag_limit: the relative residual of z or μ after a step above which the next one has more
        sweeps, problem by problem: where T contracts slowly one sweep a step falls behind.
    """

    name: str = "momentum"
    decay: Decay = "cosine"
    momentum: float = 0.8
    lag_limit: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_below_one(momentum=self.momentum)
        check_positive(lag_limit=self.lag_limit)

    def begin(self, problem: InputProblem, sweeps: int) -> MomentumRun:
        return MomentumRun(self, problem, sweeps)


@dataclass
class MomentumRun(EngineRun[MomentumEngine]):
    """State of one search with a `MomentumEngine`."""

    def __post_init__(self) -> None:
        self.last_x: Tensor | None = None
        self.slope: Tensor | None = None
        """∂ℓ/∂z of the last step, which its μ holds."""
        self.lags: tuple[Tensor, Tensor] | None = None
        """Of z and of μ after the last step, for each problem."""

    @property
    def strays(self) -> bool:
        return self.problem.region.ball is not None

    def follow(
        self, here: FixedInput, now: JointIterate, *, first: bool
    ) -> tuple[JointIterate, JointEvaluation]:
        more = self.sweeps - 1
        z = self._advanced(here.image, now.z, more)
        z = self._caught_up(here.image, z, 0)
        linear = JointLinearization(here, z, fresh=True)
        if self.slope is None:
            mu, more = linear.slope, more + FIRST_PULLS
        else:
            mu = now.mu + (linear.slope - self.slope)
        mu = self._advanced(linear.pull, mu, more)
        mu = self._caught_up(linear.pull, mu, 1)
        evaluation = linear.evaluation(mu)
        self.slope = linear.slope
        self.lags = evaluation.state_residual, evaluation.adjoint_residual
        if self.last_x is None:
            self.last_x = now.x
        return JointIterate(evaluation.image, evaluation.adjoint, now.x), evaluation

    def extrapolated(
        self, now: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        assert self.last_x is not None
        ahead = updated.x + self.engine.momentum * (updated.x - self.last_x)
        self.last_x = updated.x
        return JointIterate(updated.z, updated.mu, self.problem.region.clamp(ahead))

    def restart(self, rows: Tensor, x: Tensor) -> None:
        if self.last_x is not None:
            self.last_x = torch.where(rows[:, None], x, self.last_x)

    def _caught_up(self, image_of: Callable[[Tensor], Tensor], point: Tensor, kind: int) -> Tensor:
        """`point` after more sweeps in the problems where the last step left it behind."""
        if self.lags is None:
            return point
        groups, limit = self.problem.groups, self.engine.lag_limit
        behind = self.lags[kind] > limit
        for _ in range(MOST_EXTRA_SWEEPS):
            if not bool(behind.any()):
                break
            image = image_of(point)
            left = groups.relative_residual(point, image)
            point = torch.where(groups.to_samples(behind)[:, None], image, point)
            behind = behind & (left > limit)
        return point
