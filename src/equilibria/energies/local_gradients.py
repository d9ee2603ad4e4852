"""Derivatives that a forward pass is made of, in every grad mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equilibria.context import Context


def gradients_of(
    function: Callable[[tuple[Tensor, ...], Context], Tensor],
    tensors: Sequence[Tensor],
    context: Context,
) -> tuple[Tensor, ...]:
    """The derivatives of Σ function(tensors, context) in the tensors, in any grad mode.

    Works under `no_grad` and `inference_mode` (whose tensors autograd refuses to record: they are
    cloned). Saved-tensor hooks of the surroundings, such as activation checkpointing, are kept out:
    they would recompute the forward pass in the middle of itself. Where gradients are enabled the
    outer graph stays attached, so that second derivatives are right.
    """
    create_graph = torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        if any(tensor.is_inference() for tensor in context.tensors()):
            context = context.replace([_recordable(tensor) for tensor in context.tensors()])
        leaves = tuple(_leaf(tensor, create_graph) for tensor in tensors)
        value = function(leaves, context)
        if not value.requires_grad:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        return torch.autograd.grad(
            value.sum(), leaves, create_graph=create_graph, materialize_grads=True
        )


def _leaf(tensor: Tensor, create_graph: bool) -> Tensor:
    if create_graph and tensor.requires_grad:
        # A new node: the derivative stops here, and the graph behind it is kept.
        return tensor.view_as(tensor)
    return _recordable(tensor).detach().requires_grad_()


def _recordable(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
