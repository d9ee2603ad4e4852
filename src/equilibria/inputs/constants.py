"""A model as a constant of a search: of its weights, settings and modes at this moment."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from equilibria.context import twin
from equilibria.equilibrium import EquilibriumLayer, Solving


def as_constant(model: nn.Module, *, evaluating: bool = False) -> nn.Module:
    """A twin whose tensors need no gradient, and whose layers solve as those of `model` do now.

    The search has it for itself: the model keeps its modes, gradients and memories, other threads
    may train it meanwhile, and blocks around the search (those of a training, with a Jacobian
    penalty or warm starts) do not hear of what is solved. No graph is kept for parameters, and
    controlled norms are remembered.

    evaluating: in evaluation mode, but for layers of a model in training, which do not warn where
        they run out of iterations.
    """
    model = getattr(model, "_orig_mod", model)  # What `torch.compile` has compiled.
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        # Its tensors are out of reach; it holds no equilibrium, and is copied whole.
        whole = deepcopy(model)
        return whole.eval() if evaluating else whole
    own = twin(model, lambda tensor: tensor.detach().clone())
    for original, copy in zip(model.modules(), own.modules(), strict=True):
        is_layer = isinstance(original, EquilibriumLayer)
        copy.training = original.training and (is_layer or not evaluating)
        if isinstance(original, EquilibriumLayer) and isinstance(copy, EquilibriumLayer):
            copy.identity = object()
            copy.solving = Solving(
                solver=original.solver, gradient=original.gradient, strict=original.strict
            )
    return own
