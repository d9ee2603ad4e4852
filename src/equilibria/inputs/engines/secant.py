"""The engine of free inputs: z and μ are predicted at the next x, which quasi-Newton steps find."""

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
"""Relative to each secant: two that point the same way share their weight."""
SECANT_CAP = 10.0
"""The largest sum of weights; beyond it nothing is predicted."""


@dataclass(frozen=True, kw_only=True)
class SecantEngine(Engine):
    """Sweeps that start where the last steps of x predict z and μ.

    Measured best on latents (docs/benchmarks.md). Extrapolating x itself, as Anderson's and
    Broyden's methods do with the joint iterate, is behind quasi-Newton steps.

    memory: how many of the last steps of x predict z and μ at the next one.
    inner_memory: of Anderson's method, which accelerates the sweeps at one x; 0 for none.
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
        self, now: JointIterate, updated: JointIterate, residual: Tensor
    ) -> JointIterate:
        if not self.engine.memory:
            return updated
        groups = self.problem.groups
        self.secants.observe(now.x, (groups.join(updated.z), groups.join(updated.mu)))
        z, mu = self.secants.predict(updated.x)
        return JointIterate(groups.split(z), groups.split(mu), updated.x)


class Secants:
    """(z, μ) as a function of x, linear through its last values, one row a problem.

    A step of x leaves z and μ behind by O(‖Δx‖). Their prediction v + ΔV c, with c the weights of
    the last steps ΔX that come nearest to the new one, leaves them behind by O(‖Δx‖²) in the span
    of those steps, for a few vector operations.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.steps: list[Tensor] = []
        self.changes: list[tuple[Tensor, ...]] = []
        self.last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def observe(self, x: Tensor, values: tuple[Tensor, ...]) -> None:
        """`values` are z and μ after the sweeps at `x`."""
        if self.last is not None:
            change = tuple(now - then for now, then in zip(values, self.last[1], strict=True))
            self.steps = [*self.steps, x - self.last[0]][-self.memory :]
            self.changes = [*self.changes, change][-self.memory :]
        self.last = (x, values)

    def predict(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return z and μ at a new x."""
        assert self.last is not None
        before, values = self.last
        if not self.steps:
            return values
        steps = torch.stack(self.steps, dim=1)
        sizes = torch.linalg.vector_norm(steps, dim=2)
        inverse = torch.where(sizes > 0, 1 / torch.where(sizes > 0, sizes, 1.0), 0.0)
        units = steps * inverse[:, :, None]
        double = torch.float32 if x.device.type == "mps" else torch.float64
        gram = torch.bmm(units, units.transpose(1, 2)).to(double)
        gram.diagonal(dim1=1, dim2=2).copy_(torch.full_like(sizes, 1 + SECANT_RIDGE))
        target = torch.bmm((x - before)[:, None], units.transpose(1, 2))[:, 0].to(double)
        solved, _ = torch.linalg.solve_ex(gram, target)
        weights = solved.to(x.dtype) * inverse
        # A NaN sum compares false.
        sound = weights.abs().sum(dim=1, keepdim=True) <= SECANT_CAP
        weights = torch.where(sound, weights, 0.0)
        for i, change in enumerate(self.changes):
            values = tuple(
                torch.addcmul(value, weights[:, i, None], moved)
                for value, moved in zip(values, change, strict=True)
            )
        return values
