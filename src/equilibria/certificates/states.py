"""States as vectors: norms, rows, and the logits as a linear function of a state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import map_state, state_tensors
from equilibria.equilibrium import Cell

ROUNDINGS_PER_NUMBER = 4
"""Rounding errors of a logit ⟨row, state⟩ + offset, per number of the state."""


def norms(state: State) -> Tensor:
    """Compute the Euclidean norm of each sample."""
    squares = [tensor.flatten(1).square().sum(dim=1) for tensor in state_tensors(state)]
    return torch.stack(squares).sum(dim=0).sqrt()


def reading_error(
    rows: Tensor, offset: Tensor, size: Tensor, logits: Tensor, share: float
) -> Tensor:
    """Bound the rounding error of margins that are differences of separately computed logits.

    Each logit ⟨row_k, y⟩ + offset_k is a sum, so its error is at most
    γ(‖row_k‖‖y‖ + |offset_k|) + u|logit_k|. The error of a margin is that of both of its logits;
    where rows nearly agree it can exceed γ‖row_k − row_j‖‖y‖ by any factor.

    Args:
        rows: Row of each class, (classes, numbers).
        offset: Offset of each class.
        size: ‖y‖ of each sample.
        logits: Computed logits, (samples, classes).
        share: γ, relative error of the sums, at least the relative error u of one operation.

    Returns:
        Bound for the margin of the largest logit over each other logit, (samples, classes).
    """
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    each: Tensor = share * (size[:, None] * lengths + offset.abs() + logits.abs())
    return each + each.gather(1, logits.argmax(dim=1, keepdim=True))


def flat_rows(state: State) -> Tensor:
    """Flatten a state of several rows into a matrix, in the plain order of its numbers."""
    return torch.cat([tensor.flatten(1) for tensor in state_tensors(state)], dim=1)


def readout(cell: Cell, head: nn.Module, state: State, context: Context) -> tuple[State, Tensor]:
    """Extract the affine function from the state to the logits.

    Args:
        cell: Cell whose `output` is linear in the state.
        head: Affine head.
        state: A state; only its shape counts.
        context: Tensors that the cell reads besides the state.

    Returns:
        One row per class in the shape of the state, and the offset of each class: logit k is
        ⟨row_k, state⟩ + offset_k.
    """
    zero = map_state(lambda t: torch.zeros_like(t[:1]), state)
    offset: Tensor = head(cell.output(zero, context))[0]
    with torch.enable_grad():
        at = map_state(lambda t: t.repeat(len(offset), *[1] * (t.dim() - 1)).requires_grad_(), zero)
        logits = head(cell.output(at, context))
        gradients = torch.autograd.grad(logits.diagonal().sum(), state_tensors(at))
    return (gradients[0] if isinstance(state, Tensor) else tuple(gradients)), offset.detach()
