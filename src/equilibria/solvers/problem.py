"""A fixed-point problem as solvers see it: a map on the rows of one buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from equilibria.context import Context, Packing, State, map_state, state_tensors


@dataclass(frozen=True)
class FixedPointProblem:
    """Find y with y = step(y, context), starting from `start`.

    For the first `refresh_until` iterations the context is renewed by `refresh` (signs or
    perturbations that depend on the state); after them the map is fixed.
    """

    step: Callable[[State, Context], State]
    context: Context
    start: State
    couples_batch: bool = False
    refresh: Callable[[State, Context], Context] | None = None
    refresh_until: int = 0
    symmetric: bool = False
    """Whether the Jacobian of the map is symmetric, plainly or weighted: it has an objective."""
    contraction: float | None = None
    """A factor below which the map is proven to contract, if one is known for nothing."""

    @cached_property
    def packing(self) -> Packing:
        return Packing.of(self.start, self.couples_batch)

    @cached_property
    def state_dtype(self) -> torch.dtype:
        return state_tensors(self.start)[0].dtype

    @cached_property
    def buffer_dtype(self) -> torch.dtype:
        """Iterates and residuals are kept in float32 at least, whatever the map computes in."""
        return torch.promote_types(self.state_dtype, torch.float32)

    @property
    def epsilon(self) -> float:
        """The relative precision of what the map computes."""
        device = state_tensors(self.start)[0].device.type
        if torch.is_autocast_enabled(device):
            return torch.finfo(torch.get_autocast_dtype(device)).eps
        return torch.finfo(self.state_dtype).eps

    def pack(self, state: State) -> Tensor:
        return self.packing.pack(state).to(self.buffer_dtype)

    def unpack(self, flat: Tensor) -> State:
        return self.packing.unpack(flat.to(self.state_dtype))

    def evaluate(self, flat: Tensor) -> Tensor:
        """T(y) of the rows of `flat`."""
        return self.pack(self.step(self.unpack(flat), self.context))

    def refreshed(self, image: Tensor) -> FixedPointProblem:
        """The problem with its context renewed at the state `image`."""
        if self.refresh is None:
            return self
        return replace(self, context=self.refresh(self.unpack(image), self.context))

    def keep(self, rows: Tensor) -> FixedPointProblem:
        """The problem of some rows only."""
        return replace(
            self, context=self.context.keep(rows), start=map_state(lambda t: t[rows], self.start)
        )
