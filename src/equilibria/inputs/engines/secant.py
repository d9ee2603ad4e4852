"""Engine for unconstrained inputs: quasi-Newton steps of x, and predicted z and μ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs.engines.base import Engine, EngineRun
from equilibria.inputs.iterates import JointIterate
from equilibria.inputs.problem import InputProblem
from equilibria.inputs.steps import Decay, Rule
from equilibria.registry import check_not_negative
from equilibria.solvers import Anderson, Solver

SECANT_RIDGE = 1e-6
"""Ridge of the normal equations for unit steps. Parallel steps share their weight."""
MAX_WEIGHT_SUM = 10.0
"""Largest sum of the absolute weights. If it is exceeded, nothing is extrapolated."""


@dataclass(frozen=True, kw_only=True)
class SecantEngine(Engine):
    """Engine of quasi-Newton steps of the input x, with predicted equilibrium z and adjoint μ.

    Sweeps, the updates of z and μ at the new x, start at the prediction. It is the fastest engine
    for latents (docs/benchmarks.md).

    Args:
        memory: Number of the last steps of x that predict z and μ at the next x.
        inner_memory: Memory of Anderson's method, which accelerates the sweeps at one x; 0 for
            plain sweeps.

    The other arguments are those of `Engine`.
    """

    name: str = "secant"
    rule: Rule = "quasi-newton"
    decay: Decay = "linear"
    memory: int = 2
    inner_memory: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(memory=self.memory, inner_memory=self.inner_memory)

    def begin(self, problem: InputProblem, sweeps: int) -> SecantRun:
        return SecantRun(self, problem, sweeps)


@dataclass
class SecantRun(EngineRun[SecantEngine]):
    """State of one search with a `SecantEngine`."""

    def __post_init__(self) -> None:
        self.secants = Secants(self.engine.memory)
        memory = self.engine.inner_memory
        self._inner = Anderson(memory=memory) if memory else None

    @property
    def inner(self) -> Solver[Any] | None:
        return self._inner

    def extrapolated(
        self, current: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        if not self.engine.memory:
            return updated
        groups = self.problem.groups
        self.secants.observe(current.x, (groups.join(updated.z), groups.join(updated.mu)))
        z, mu = self.secants.predict(updated.x)
        return JointIterate(groups.split(z), groups.split(mu), updated.x)


class Secants:
    """Linear model of equilibrium z and adjoint μ as a function of the input x.

    It extrapolates the last values, with one row per problem. After a step of x, the previous z and
    μ have an error of O(‖Δx‖). The prediction v + ΔV c, where v are the last values, ΔV and ΔX
    their last changes and those of x, and ΔX c approximates the new step, has an error of O(‖Δx‖²)
    in the span of these steps, at the cost of a few vector operations.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.steps: list[Tensor] = []
        self.changes: list[tuple[Tensor, ...]] = []
        self.last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def observe(self, x: Tensor, values: tuple[Tensor, ...]) -> None:
        """Record equilibrium z and adjoint μ after their updates at the input `x`."""
        if self.last is not None:
            change = tuple(new - old for new, old in zip(values, self.last[1], strict=True))
            self.steps = [*self.steps, x - self.last[0]][-self.memory :]
            self.changes = [*self.changes, change][-self.memory :]
        self.last = (x, values)

    def predict(self, x: Tensor) -> tuple[Tensor, ...]:
        """Predict equilibrium z and adjoint μ at a new input x."""
        assert self.last is not None
        last_x, values = self.last
        if not self.steps:
            return values
        steps = torch.stack(self.steps, dim=1)
        sizes = torch.linalg.vector_norm(steps, dim=2)
        inverse = torch.where(sizes > 0, 1 / torch.where(sizes > 0, sizes, 1.0), 0.0)
        units = steps * inverse[:, :, None]
        double = torch.float32 if x.device.type == "mps" else torch.float64
        gram = torch.bmm(units, units.transpose(1, 2)).to(double)
        gram.diagonal(dim1=1, dim2=2).copy_(torch.full_like(sizes, 1 + SECANT_RIDGE))
        target = torch.bmm((x - last_x)[:, None], units.transpose(1, 2))[:, 0].to(double)
        solution, _ = torch.linalg.solve_ex(gram, target)
        weights = solution.to(x.dtype) * inverse
        # The comparison is false for NaN.
        usable = weights.abs().sum(dim=1, keepdim=True) <= MAX_WEIGHT_SUM
        weights = torch.where(usable, weights, 0.0)
        for i, changes in enumerate(self.changes):
            values = tuple(
                torch.addcmul(value, weights[:, i, None], change)
                for value, change in zip(values, changes, strict=True)
            )
        return values
