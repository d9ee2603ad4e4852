"""What input optimization asks of a model, a loss and a start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.context import Context
from equilibria.equilibrium import EquilibriumLayer

Module = Callable[[Tensor], Tensor]


def check_model(model: nn.Module) -> tuple[Module, EquilibriumLayer, Module]:
    """stem, layer and head of a model whose samples are independent of each other."""
    parts = tuple(getattr(model, name, None) for name in ("stem", "layer", "head"))
    stem, layer, head = parts
    if not (callable(stem) and callable(head) and isinstance(layer, EquilibriumLayer)):
        raise TypeError(
            f"{type(model).__name__} needs a stem, a layer (an EquilibriumLayer) and a head, as "
            "every EquilibriumClassifier has; use nn.Identity() for a part that does nothing"
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name} is a BatchNorm that uses the statistics of its batch, which makes the "
                "input of one sample depend on the others: call model.eval() first, or use group "
                "norms"
            )
    if layer.couples_batch:
        raise ValueError(
            f"{type(layer.cell).__name__} or its solver couples the samples of a batch, so their "
            "inputs cannot be optimized one by one: call model.eval() if that is only so in "
            "training, or choose terms, norms and a solver without coupling"
        )
    if layer.cell.refresh_until:
        raise ValueError(
            f"{type(layer.cell).__name__} renews its context during a solve (frozen signs, "
            "perturbations), so its map is no function of the input alone: use sign='smooth' and "
            "pe='off', or call model.eval() if it does so only in training"
        )
    return stem, layer, head


def check_repeats(
    model: nn.Module, inject: Callable[[], tuple[Context, Tensor]]
) -> tuple[Context, Tensor]:
    """Refuse a model that draws at random or learns as it goes: every x-step would change it.

    The context and the injected features of the last call come back.
    """
    # A statistic that has seen nothing takes the first input that comes: that is no change.
    with torch.no_grad():
        context, injected = inject()
    before = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        # Others are learned where gradients are wanted, as in the search.
        with torch.enable_grad():
            earlier, (context, injected) = context, inject()
        repeats = all(map(_same, context.tensors(), earlier.tensors()))
        if repeats:
            break
    changed = [
        (buffer, kept)
        for buffer, kept in zip(model.buffers(), before, strict=True)
        if not _same(buffer, kept)
    ]
    with torch.no_grad():
        for buffer, kept in changed:
            buffer.copy_(kept)
    if changed or not repeats:
        raise ValueError(
            "the model gives two answers to one input: it draws at random, or learns running "
            "statistics as it goes; call model.eval() first"
        )
    return context, injected


def _same(one: Tensor, other: Tensor) -> bool:
    with torch.no_grad():
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def check_start(x0: object) -> Tensor:
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        raise TypeError("x0 must be a tensor of floating-point numbers")
    if x0.dim() < 2 or len(x0) == 0:
        raise ValueError(
            f"x0 must have one row a problem and at least one row, not shape {tuple(x0.shape)}"
        )
    return x0


def checked_losses(values: object, given: Tensor, count: int, name: str) -> Tensor:
    """One number a sample, or an error that says what came instead; `given` made the values."""
    if not isinstance(values, Tensor) or values.shape != (count,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"{name} must return one number for each of the {count} rows it is given, a tensor of "
            f"shape ({count},), not {got}; use reduction='none' and sum over what is left"
        )
    if torch.is_grad_enabled() and given.requires_grad and not values.requires_grad:
        raise ValueError(
            f"{name} does not depend on what it is given in a way that can be differentiated"
        )
    return values


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """The parameters as constants: no graph is kept for them, and controlled norms are remembered.

    They are as they were afterwards.
    """
    # A tensor that something else has computed cannot be switched off, and stays as it is.
    switched = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    try:
        for parameter in switched:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in switched:
            parameter.requires_grad_(True)
