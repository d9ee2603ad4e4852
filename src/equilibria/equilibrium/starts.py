"""Where the solves of a layer start."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import at_least_float32, in_format_of, map_state, state_tensors
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.cell import Cell
from equilibria.operators.norm_control import is_wrapped
from equilibria.solvers._cpu import is_cheap_to_read


def start_of(
    cell: Cell,
    inputs: tuple[Tensor, ...],
    context: Context,
    given: State | None,
    *,
    from_zero: bool,
) -> State:
    """Return the state that a solve starts from.

    Args:
        cell: Cell that is solved.
        inputs: Inputs of the layer.
        context: Result of the cell's `inject`.
        given: State that the caller chose, such as that of an earlier solution; None starts at
            T(0) where that costs nothing, otherwise at the cell's initial state.
        from_zero: Whether to start at the cell's initial state, in the graph of the inputs, because
            the gradient rule differentiates the iterations.

    Raises:
        ValueError: If the given state does not have the shapes of the cell's state.
    """
    first = None if from_zero or given is not None else capabilities.first_image(cell, context)
    expected = cell.initial_state(*inputs, context) if first is None else first
    if torch.is_autocast_enabled(inputs[0].device.type):
        # The map computes in half precision; the iterates are kept in single.
        expected = map_state(at_least_float32, expected)
    if first is not None:
        return finite_start(expected, context)
    if given is None:
        # Unrolled iterations are differentiated in their start too, where that is the input.
        return expected if from_zero else map_state(torch.Tensor.detach, expected)
    shapes, wanted = ([tuple(t.shape) for t in state_tensors(s)] for s in (given, expected))
    if shapes != wanted:
        raise ValueError(f"the start has shapes {shapes}, the state {wanted}")
    return map_state(lambda like, t: in_format_of(like, t.detach().to(like)), expected, given)


def finite_start(first: State, context: Context) -> State:
    """Return T(0) as a start that owns its memory, with zeros in the place of NaN and infinity.

    A solver returns its start if no evaluation was finite.
    """
    return map_state(functools.partial(_finite_tensor, context=context), first)


def _finite_tensor(first: Tensor, context: Context) -> Tensor:
    first = first.detach()
    # Reading the sum is cheaper than a copy; a sum that overflows causes a needless copy. A tensor
    # of the context may belong to the caller, so that the solver must not overwrite it.
    if not is_wrapped(first) and is_cheap_to_read(first) and math.isfinite(first.sum()):
        own = all(first.data_ptr() != tensor.data_ptr() for tensor in context.tensors())
        return first if own else first.clone()
    return first.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
