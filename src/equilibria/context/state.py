"""The state of an equilibrium, one tensor or several, and its packing into a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Tensor | tuple[Tensor, ...]
"""A tensor with the batch in the first dimension, or a tuple of them (branches)."""

Layout = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a state, without the batch dimension."""


def state_tensors(state: State) -> tuple[Tensor, ...]:
    """Return the tensors of a state in a tuple.

    Examples:
        >>> tensor, branches = torch.ones(2), (torch.ones(2),) * 3
        >>> from equilibria.context.state import state_tensors
        >>> len(state_tensors(tensor)), len(state_tensors(branches))
        (1, 3)
    """
    return (state,) if isinstance(state, Tensor) else tuple(state)


def unflatten_state(like: State, tensors: Iterable[Tensor]) -> State:
    """Return `tensors` in the structure of `like`.

    Args:
        like: A single tensor, or a tuple of tensors.
        tensors: Tensors of the result.

    Examples:
        >>> branches = (torch.ones(1), torch.ones(2))
        >>> from equilibria.context.state import unflatten_state
        >>> unflatten_state(branches, [torch.zeros(1), torch.zeros(2)])
        (tensor([0.]), tensor([0., 0.]))
    """
    collected = tuple(tensors)
    return collected[0] if isinstance(like, Tensor) else collected


def map_state(function: Callable[..., Tensor], *states: State) -> State:
    """Apply a function to corresponding tensors of states.

    Args:
        function: Called with one tensor of each state.
        states: States of the same structure.

    Examples:
        >>> branches = (torch.ones(1), torch.ones(2))
        >>> from equilibria.context.state import map_state
        >>> map_state(torch.add, branches, branches)
        (tensor([2.]), tensor([2., 2.]))
    """
    columns = zip(*(state_tensors(state) for state in states), strict=True)
    return unflatten_state(states[0], (function(*tensors) for tensors in columns))


def batch_size(state: State) -> int:
    """Return the number of samples of a state.

    Examples:
        >>> from equilibria.context.state import batch_size
        >>> batch_size((torch.ones(2, 3), torch.ones(2, 5)))
        2
    """
    return state_tensors(state)[0].shape[0]


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or unchanged if its type is wider.

    Norms, sums and logarithms are not computed in half precision.

    Examples:
        >>> from equilibria.context.state import at_least_float32
        >>> at_least_float32(torch.ones(1, dtype=torch.float16)).dtype
        torch.float32
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def sum_per_sample(values: Tensor) -> Tensor:
    """Sum over all dimensions except the first, in at least float32.

    Examples:
        >>> from equilibria.context.state import sum_per_sample
        >>> sum_per_sample(torch.ones(2, 3, 4))
        tensor([12., 12.])
    """
    return values.flatten(1).sum(dim=1, dtype=torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True)
class Packing:
    """Layout of a state in a buffer of shape (problems, size), the format of solvers.

    Each sample is one problem, that is one row. If the samples of a batch are coupled, the batch is
    one problem and the buffer has one row. A tensor in channels_last format is packed in that
    order, so that packing and unpacking copy nothing.

    Args:
        layout: Shapes of the tensors, without the batch dimension.
        single: Whether the state is a tensor and not a tuple.
        samples: Number of samples.
        couples_batch: Whether the batch is one problem.
        channels_last: For each tensor, whether it is in channels_last format.

    Examples:
        >>> from equilibria.context.state import Packing
        >>> packing = Packing.of((torch.ones(2, 3), torch.ones(2, 1, 2)))
        >>> rows = packing.pack((torch.ones(2, 3), torch.ones(2, 1, 2)))
        >>> rows.shape, [part.shape for part in packing.unpack(rows)]
        (torch.Size([2, 5]), [torch.Size([2, 3]), torch.Size([2, 1, 2])])
    """

    layout: Layout
    single: bool
    samples: int
    couples_batch: bool = False
    channels_last: tuple[bool, ...] = ()

    @classmethod
    def of(cls, state: State, couples_batch: bool = False) -> Packing:
        """Return the packing of states shaped like `state`."""
        tensors = state_tensors(state)
        return cls(
            layout=tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            single=isinstance(state, Tensor),
            samples=batch_size(state),
            couples_batch=couples_batch,
            channels_last=tuple(is_channels_last(tensor) for tensor in tensors),
        )

    @property
    def size(self) -> int:
        """Number of entries of the state of one sample."""
        return sum(_size(shape) for shape in self.layout)

    @cached_property
    def _is_matrix(self) -> bool:
        """Whether states are matrices, which need no packing."""
        return self.single and len(self.layout[0]) == 1 and not self.couples_batch

    def pack(self, state: State) -> Tensor:
        """Return the state as a matrix of shape (problems, size); a view if possible."""
        if self._is_matrix and isinstance(state, Tensor) and state.dim() == 2:
            return state
        pieces = [
            _flatten(tensor, last)
            for tensor, last in zip(state_tensors(state), self.channels_last, strict=True)
        ]
        rows = pieces[0] if self.single else torch.cat(pieces, dim=1)
        # An empty batch has no problem, coupled or not.
        return rows.reshape(1, -1) if self.couples_batch and len(rows) else rows

    def unpack(self, flat: Tensor) -> State:
        """Return the state of a matrix of shape (problems, size)."""
        if self._is_matrix:
            return flat
        rows = flat.reshape(self.samples, -1) if self.couples_batch and len(flat) else flat
        if self.single:
            return _unflatten(rows, self.layout[0], self.channels_last[0])
        pieces = torch.split(rows, [_size(shape) for shape in self.layout], dim=1)
        return tuple(map(_unflatten, pieces, self.layout, self.channels_last))


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether a batch of images is in channels_last format, and in no other."""
    return (
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
    )


def in_format_of(like: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` in the memory format of `like`, so that packing needs no copy."""
    memory_format = torch.channels_last if is_channels_last(like) else torch.contiguous_format
    return tensor.contiguous(memory_format=memory_format)


def _flatten(tensor: Tensor, channels_last: bool) -> Tensor:
    ordered = tensor.permute(0, 2, 3, 1) if channels_last else tensor
    return ordered.reshape(tensor.shape[0], _size(tensor.shape[1:]))


def _unflatten(rows: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    if not channels_last:
        return rows.reshape(rows.shape[0], *shape)
    channels, height, width = shape
    return rows.reshape(rows.shape[0], height, width, channels).permute(0, 3, 1, 2)


def _size(shape: tuple[int, ...]) -> int:
    # Used instead of -1, which is ambiguous for an empty batch.
    return math.prod(shape)
