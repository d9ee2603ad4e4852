"""Initial states of solves."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import at_least_float32, in_format_of, map_state, state_tensors
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.cell import Cell
from equilibria.operators.norm_control import is_wrapped
from equilibria.registry import Registry, check_positive
from equilibria.solvers._cpu import is_cheap_to_read


class Start:
    """Base class of the starts that `Solving(start=…)` accepts; see `CellStart`, `RandomStart`."""


@dataclass(frozen=True)
class CellStart(Start):
    """Start of solves at the map of the zero state, or at the initial state of the cell."""


@dataclass(frozen=True)
class RandomStart(Start):
    """Start of solves at independent normal random numbers.

    In training mode, the numbers come from PyTorch's global generator, like those of dropout. In
    evaluation mode they come from `seed` and are the same for every sample: results are
    reproducible and do not depend on the rest of the batch.

    Args:
        scale: Standard deviation.
        seed: Seed of the numbers in evaluation mode.
    """

    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(scale=self.scale)

    def draw(self, like: State, *, training: bool, index: int = 0) -> State:
        """Return a random state.

        Args:
            like: State of the same shapes.
            training: Whether every sample gets other numbers, from the global generator.
            index: Number of the start, if there are several per sample.
        """
        generator = torch.Generator().manual_seed(self.seed * MAX_STARTS + index)

        def numbers(tensor: Tensor) -> Tensor:
            if training:
                return self.scale * torch.randn_like(tensor)
            # Drawn in float32 on the CPU, so that the numbers are the same on all devices.
            one = self.scale * torch.randn(tensor.shape[1:], generator=generator)
            return in_format_of(tensor, one.to(tensor).expand(tensor.shape).contiguous())

        return map_state(numbers, like)


MAX_STARTS = 1024
"""Largest number of starts per sample."""

_starts: Registry[Start] = Registry("start", Start, {"cell": CellStart, "random": RandomStart})
get_start = _starts.resolve


def start_of(
    cell: Cell,
    inputs: tuple[Tensor, ...],
    context: Context,
    custom: State | None,
    *,
    from_zero: bool,
    random: RandomStart | None = None,
    training: bool = False,
) -> State:
    """Return the state that a solve starts from.

    Args:
        cell: Cell that is solved.
        inputs: Inputs of the layer.
        context: Result of the cell's `inject`.
        custom: State chosen by the caller, such as that of an earlier solution. None starts at
            T(0), the map at the zero state, if that costs nothing, otherwise at the cell's initial
            state.
        from_zero: Whether to start at the cell's initial state, in the graph of the inputs, because
            the gradient rule differentiates the iterations.
        random: Draws the start if there is no custom one.
        training: Whether the layer is in training mode.

    Raises:
        ValueError: If `custom` does not have the shapes of the cell's state.
    """
    first = None if from_zero or custom is not None else capabilities.first_image(cell, context)
    expected = cell.initial_state(*inputs, context) if first is None else first
    if torch.is_autocast_enabled(inputs[0].device.type):
        # The map computes in half precision, but the iterates are stored in single precision.
        expected = map_state(at_least_float32, expected)
    if random is not None and custom is None:
        return random.draw(map_state(torch.Tensor.detach, expected), training=training)
    if first is not None:
        return finite_start(expected, context)
    if custom is None:
        # The initial state may depend on the input, and unrolling differentiates through it.
        return expected if from_zero else map_state(torch.Tensor.detach, expected)
    shapes, required = ([tuple(t.shape) for t in state_tensors(s)] for s in (custom, expected))
    if shapes != required:
        raise ValueError(f"start has shapes {shapes}; it must have those of the state, {required}")
    return map_state(lambda like, t: in_format_of(like, t.detach().to(like)), expected, custom)


def finite_start(first: State, context: Context) -> State:
    """Return T(0), the map at the zero state, as a start, with NaN and infinity set to zero.

    It owns its memory. It must be finite because a solver returns it if no evaluation was finite.
    """
    return map_state(functools.partial(_finite_tensor, context=context), first)


def _finite_tensor(first: Tensor, context: Context) -> Tensor:
    first = first.detach()
    # Reading the sum is cheaper than a copy; an overflowing sum only causes an unneeded copy.
    # Tensors of the context may belong to the caller, and the solver must not overwrite them.
    if not is_wrapped(first) and is_cheap_to_read(first) and math.isfinite(first.sum()):
        is_own = all(first.data_ptr() != tensor.data_ptr() for tensor in context.tensors())
        return first if is_own else first.clone()
    return first.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def with_noise(start: State, deviation: float) -> State:
    """Return a start with added normal noise, from PyTorch's global generator.

    Args:
        start: The start.
        deviation: Standard deviation of the noise; 0 returns the start unchanged.
    """
    if not deviation:
        return start
    return map_state(lambda tensor: tensor + deviation * torch.randn_like(tensor), start)
