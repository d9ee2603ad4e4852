"""Bounds on the rounding error of a computed gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from equilibria.context import Context

Extra: TypeAlias = Callable[[Context, Tensor], Tensor]
"""Function of the context and ‖y‖ per sample that returns an error bound per sample."""


@dataclass(frozen=True)
class Rounding:
    """Bound on the rounding error of the computed gradient ∇E(y; x) of an energy.

    With c = Ux + b as computed (see `Input`), the error of a sample is at most

        state·‖y‖ + injected·‖c‖ + feature·‖x‖ + carried·‖error of x‖ + extra.

    Args:
        state: Coefficient of ‖y‖.
        injected: Coefficient of ‖c‖.
        feature: Coefficient of ‖x‖.
        carried: Coefficient of the error of the input.
        extra: Rest of the bound, a function of the energy's context (tensors that it reads besides
            the state) and of ‖y‖, shape (B,).
    """

    state: float = 0.0
    injected: float = 0.0
    feature: float = 0.0
    carried: float = 0.0
    extra: Extra | None = None

    def at(self, context: Context, state: Tensor, feature: Tensor, error: Tensor) -> Tensor:
        """Return the bound of each sample.

        Args:
            context: Tensors that the energy reads besides the state.
            state: ‖y‖, shape (B,).
            feature: ‖x‖, shape (B,).
            error: Norm of the error of x, shape (B,).
        """
        linear = self.state * state + self.injected * injected_size(context)
        propagated = self.feature * feature + self.carried * error
        extra = 0.0 if self.extra is None else self.extra(context, state)
        return linear + propagated + extra

    def __add__(self, other: Rounding) -> Rounding:
        return self._joined(other, operator.add, operator.add, operator.add)

    def __mul__(self, factor: float) -> Rounding:
        inner = self.extra
        scaled = None if inner is None else lambda context, y: factor * inner(context, y)
        coefficients = (self.state, self.injected, self.feature, self.carried)
        state, injected, feature, carried = (factor * each for each in coefficients)
        return Rounding(state, injected, feature, carried, scaled)

    def beside(self, other: Rounding) -> Rounding:
        """Return the bound of two branches, which share the input x but not the state y."""
        return self._joined(other, max, math.hypot, torch.hypot)

    def inside(self, name: str) -> Rounding:
        """Return the bound with `extra` evaluated at the part `name` of a context."""
        inner = self.extra
        if inner is None:
            return self
        return replace(self, extra=lambda context, y: inner(context.parts[name], y))

    def _joined(
        self,
        other: Rounding,
        join_own: Callable[[float, float], float],
        join_shared: Callable[[float, float], float],
        join_extra: Callable[[Tensor, Tensor], Tensor],
    ) -> Rounding:
        a, b = self.extra, other.extra

        def joined(context: Context, y: Tensor) -> Tensor:
            assert a is not None
            assert b is not None
            return join_extra(a(context, y), b(context, y))

        return Rounding(
            join_own(self.state, other.state),
            join_own(self.injected, other.injected),
            join_shared(self.feature, other.feature),
            join_shared(self.carried, other.carried),
            joined if a is not None and b is not None else a or b,
        )


def injected_size(context: Context) -> Tensor:
    """Return ‖c‖ of each sample, c = Ux + b the injected input in all parts of the context."""

    def squares(part: Context) -> Iterator[Tensor]:
        if "c" in part.sample:
            yield torch.linalg.vector_norm(part["c"].flatten(1), dim=1).double().square()
        for inner in part.parts.values():
            yield from squares(inner)

    return torch.stack(list(squares(context))).sum(dim=0).sqrt()
