"""Gradients computed inside a forward pass, in every grad mode."""

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
    """Return the gradients of Σ function(tensors, context) in the tensors, in any grad mode.

    Works under `no_grad` and `inference_mode`; inference tensors are cloned because autograd cannot
    record them. If gradients are enabled, the outer graph stays attached, which supports second
    derivatives. Outer saved-tensor hooks, such as those of activation checkpointing, are disabled,
    because they would recompute the forward pass within itself.

    Args:
        function: Returns one number per sample, or a scalar.
        tensors: Tensors to differentiate by.
        context: Passed on to `function`.
    """
    create_graph = torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
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
        # A view is a new node: differentiation stops at it, and the graph behind it stays intact.
        return tensor.view_as(tensor)
    return _recordable(tensor).detach().requires_grad_()


def _recordable(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor
