"""A bound of the rounding error of a computed gradient."""

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
"""From the context and ‖y‖ of samples to a bound of an error."""


@dataclass(frozen=True)
class Rounding:
    """Bound on the rounding error of ∇E(y; x), with c = Ux + b as computed.

    state·‖y‖ + injected·‖c‖ + feature·‖x‖ + carried·‖error of x‖ + extra
    """

    state: float = 0.0
    injected: float = 0.0
    feature: float = 0.0
    carried: float = 0.0
    extra: Extra | None = None

    def at(self, context: Context, state: Tensor, feature: Tensor, error: Tensor) -> Tensor:
        """The bound for samples of these sizes."""
        linear = self.state * state + self.injected * injected_size(context)
        passed = self.feature * feature + self.carried * error
        more = 0.0 if self.extra is None else self.extra(context, state)
        return linear + passed + more

    def __add__(self, other: Rounding) -> Rounding:
        return self._joined(other, operator.add, operator.add, operator.add)

    def __mul__(self, factor: float) -> Rounding:
        inner = self.extra
        scaled = None if inner is None else lambda context, y: factor * inner(context, y)
        shares = (self.state, self.injected, self.feature, self.carried)
        state, injected, feature, carried = (factor * share for share in shares)
        return Rounding(state, injected, feature, carried, scaled)

    def beside(self, other: Rounding) -> Rounding:
        """Of two branches, which share x and have a y and a c each."""
        return self._joined(other, max, math.hypot, torch.hypot)

    def inside(self, name: str) -> Rounding:
        """Of a part: what it says of its own context, said of the whole."""
        inner = self.extra
        if inner is None:
            return self
        return replace(self, extra=lambda context, y: inner(context.parts[name], y))

    def _joined(
        self,
        other: Rounding,
        own: Callable[[float, float], float],
        shared: Callable[[float, float], float],
        extra: Callable[[Tensor, Tensor], Tensor],
    ) -> Rounding:
        one, two = self.extra, other.extra

        def both(context: Context, y: Tensor) -> Tensor:
            assert one is not None
            assert two is not None
            return extra(one(context, y), two(context, y))

        return Rounding(
            own(self.state, other.state),
            own(self.injected, other.injected),
            shared(self.feature, other.feature),
            shared(self.carried, other.carried),
            both if one is not None and two is not None else one or two,
        )


def injected_size(context: Context) -> Tensor:
    """‖c‖ of each sample, c = Ux + b in all parts."""

    def found(part: Context) -> Iterator[Tensor]:
        if "c" in part.sample:
            yield torch.linalg.vector_norm(part["c"].flatten(1), dim=1).double().square()
        for inner in part.parts.values():
            yield from found(inner)

    return torch.stack(list(found(context))).sum(dim=0).sqrt()
