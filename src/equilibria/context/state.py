"""The state of an equilibrium: one tensor or several, and its packing into one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Tensor | tuple[Tensor, ...]
"""One batch-first tensor, or a tuple of them (branches of different shape)."""

Layout = tuple[tuple[int, ...], ...]
"""The shapes of a state's tensors, without the batch."""


def state_tensors(state: State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def unflatten_state(like: State, tensors: Iterable[Tensor]) -> State:
    """`tensors` in the structure of `like`."""
    collected = tuple(tensors)
    return collected[0] if isinstance(like, Tensor) else collected


def map_state(function: Callable[..., Tensor], *states: State) -> State:
    """`function` applied to corresponding tensors of the states."""
    columns = zip(*(state_tensors(state) for state in states), strict=True)
    return unflatten_state(states[0], (function(*tensors) for tensors in columns))


def batch_size(state: State) -> int:
    return int(state_tensors(state)[0].shape[0])


def sum_per_sample(values: Tensor) -> Tensor:
    """The sum over all dimensions but the first, in float32 at least."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.flatten(1).sum(dim=1, dtype=dtype)


@dataclass(frozen=True)
class Packing:
    """How a state is laid out in one `(problems, size)` buffer, the only shape solvers see.

    Each sample is a problem of its own, a row. Where the samples of a batch are coupled
    (`couples_batch`) the whole batch is one problem and the buffer has one row.
    """

    layout: Layout
    single: bool
    samples: int
    couples_batch: bool = False

    @classmethod
    def of(cls, state: State, couples_batch: bool = False) -> Packing:
        tensors = state_tensors(state)
        return cls(
            layout=tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            single=isinstance(state, Tensor),
            samples=batch_size(state),
            couples_batch=couples_batch,
        )

    def pack(self, state: State) -> Tensor:
        """The state as a `(problems, size)` matrix; a view where that is possible."""
        rows = self._rows(state)
        # An empty batch is no problem at all, coupled or not.
        return rows.reshape(1, -1) if self.couples_batch and len(rows) else rows

    def unpack(self, flat: Tensor) -> State:
        rows = flat.reshape(self.samples, -1) if self.couples_batch and len(flat) else flat
        if self.single:
            return rows.reshape(rows.shape[0], *self.layout[0])
        sizes = [_size(shape) for shape in self.layout]
        pieces = torch.split(rows, sizes, dim=1)
        return tuple(
            piece.reshape(rows.shape[0], *shape)
            for piece, shape in zip(pieces, self.layout, strict=True)
        )

    def _rows(self, state: State) -> Tensor:
        tensors = state_tensors(state)
        rows = [tensor.reshape(tensor.shape[0], _size(tensor.shape[1:])) for tensor in tensors]
        return rows[0] if self.single else torch.cat(rows, dim=1)


def _size(shape: tuple[int, ...]) -> int:
    # Not -1: a reshape to -1 is ambiguous for an empty batch.
    return math.prod(shape)
