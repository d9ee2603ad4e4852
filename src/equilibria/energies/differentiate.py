"""Differentiating inside a solve, whatever grad mode surrounds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from equilibria.context import Context


@contextmanager
def local_graph(
    tensors: Sequence[Tensor], context: Context, create_graph: bool
) -> Iterator[tuple[tuple[Tensor, ...], Context]]:
    """Tensors to differentiate with respect to, in a grad mode that allows it.

    Works under `no_grad` and `inference_mode` (whose tensors autograd refuses to record: they are
    cloned). Saved-tensor hooks of the surroundings, such as activation checkpointing, are kept out:
    they would recompute the forward pass in the middle of itself. With `create_graph` the outer
    graph stays attached, so that second derivatives are right.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        if any(tensor.is_inference() for tensor in context.tensors()):
            context = context.replace([_recordable(tensor) for tensor in context.tensors()])
        yield tuple(_leaf(tensor, create_graph) for tensor in tensors), context


def _leaf(tensor: Tensor, create_graph: bool) -> Tensor:
    if create_graph and tensor.requires_grad:
        # A new node: the derivative stops here, and the graph behind it is kept.
        return tensor.view_as(tensor)
    return _recordable(tensor).detach().requires_grad_()


def _recordable(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
