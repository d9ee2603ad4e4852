"""Engine for constrained inputs: projected steps with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.inputs.engines.base import EXTRA_FIRST_PULLBACKS, Engine, EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import FixedInput, InputProblem, JointEvaluation, JointLinearization
from equilibria.inputs.steps import Decay
from equilibria.registry import check_below_one, check_positive

MAX_EXTRA_SWEEPS = 5
"""Limit of additional sweeps per step for a z or μ that residuals behind."""


@dataclass(frozen=True, kw_only=True)
class MomentumEngine(Engine):
    """Engine of projected, normalized gradient steps with momentum, each with one evaluation.

    A step of the input x is x⁺ = Π(y − α g/‖g‖) from the extrapolated point y = x + β (x − x⁻),
    with the projection Π to the constraint, step length α, momentum β, and the gradient g of the
    loss.

    y is clamped to the bounds of a box, because the model may not be defined outside, but it is not
    projected to the ball, which would remove most of the momentum. At y one graph holds an update
    z⁺ = T(z; y) of the equilibrium, the loss at z⁺ with its slope s, and the pull-back to the
    adjoint μ⁺ = Jᵀμ + s and g, J = ∂T/∂z. Before the pull-back, the change of s since the last step
    is added to μ, so x, z and s belong to the same step and only the Jᵀ in μ is older.

    Args:
        momentum: β, at least 0 and below 1.
        lag_limit: Relative residual of z or μ after a step above which the next step of this
            problem has additional sweeps. One sweep per step is too few if T contracts slowly.

    The other arguments are those of `Engine`.

    Notes:
        A linear decay needs about 20 % more steps than the cosine.
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
        """∂ℓ/∂z of the last step, which is part of its μ."""
        self.residuals: tuple[Tensor, Tensor] | None = None
        """Relative residuals of z and of μ after the last step, one per problem."""

    @property
    def leaves_region(self) -> bool:
        return self.problem.region.ball is not None

    def update(
        self, fixed: FixedInput, current: JointIterate, *, first: bool
    ) -> tuple[JointIterate, JointEvaluation]:
        pullbacks = self.sweeps - 1
        z = self._advanced(fixed.image, current.z, self.sweeps - 1)
        z = self._swept_further(fixed.image, z, 0)
        linear = JointLinearization(fixed, z, loss_at_image=True)
        if self.slope is None:
            mu, pullbacks = linear.slope, pullbacks + EXTRA_FIRST_PULLBACKS
        else:
            mu = current.mu + (linear.slope - self.slope)
        mu = self._advanced(linear.pull, mu, pullbacks)
        mu = self._swept_further(linear.pull, mu, 1)
        evaluation = linear.evaluation(mu)
        self.slope = linear.slope
        self.residuals = evaluation.state_residual, evaluation.adjoint_residual
        if self.last_x is None:
            self.last_x = current.x
        return JointIterate(evaluation.image, evaluation.adjoint, current.x), evaluation

    def extrapolated(
        self, current: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        assert self.last_x is not None
        ahead = updated.x + self.engine.momentum * (updated.x - self.last_x)
        self.last_x = updated.x
        return JointIterate(updated.z, updated.mu, self.problem.region.clamp(ahead))

    def restart(self, rows: Tensor, x: Tensor) -> None:
        if self.last_x is not None:
            self.last_x = torch.where(rows[:, None], x, self.last_x)

    def _swept_further(
        self, image_of: Callable[[Tensor], Tensor], point: Tensor, kind: int
    ) -> Tensor:
        """Sweep problems with a large residual further; `kind` is 0 for z and 1 for μ."""
        if self.residuals is None:
            return point
        groups, limit = self.problem.groups, self.engine.lag_limit
        behind = self.residuals[kind] > limit
        for _ in range(MAX_EXTRA_SWEEPS):
            if not bool(behind.any()):
                break
            image = image_of(point)
            residual = groups.relative_residual(point, image)
            point = torch.where(groups.to_samples(behind)[:, None], image, point)
            behind = behind & (residual > limit)
        return point
