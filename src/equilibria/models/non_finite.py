"""Checks for NaN and infinite values in the inputs, parameters and buffers of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from equilibria.context.caller import warn_caller
from equilibria.context.context import is_exporting, run_eagerly
from equilibria.models.blocks import first_layer
from equilibria.operators.norm_control import is_wrapped
from equilibria.solvers._cpu import is_cheap_to_read

MAX_LISTED = 5
"""Largest number of samples or tensors that a message lists."""


class NonFiniteInputError(ValueError):
    """A training batch contains NaN or infinite values.

    It is raised before the first layer runs, because batch normalization would spread one such
    image to all samples and into the running statistics.

    Examples:
        >>> model = eq.create_model("opteq-small")
        >>> try:
        ...     model(torch.full((1, 3, 8, 8), torch.nan))
        ... except eq.models.NonFiniteInputError as error:
        ...     print(str(error)[:46])
        1 of 1 samples hold NaN or infinite values (0)
    """


class NonFiniteWeightsWarning(UserWarning):
    """A model has parameters or buffers that are NaN or infinite; its outputs are meaningless.

    Examples:
        >>> issubclass(eq.models.NonFiniteWeightsWarning, UserWarning)
        True
    """


def finite_samples(batch: Tensor) -> Tensor:
    """Return whether all values of a sample are finite, for each sample of a batch.

    Args:
        batch: Samples, shape (B, ...).

    Returns:
        Booleans, shape (B,).

    Examples:
        >>> eq.models.finite_samples(torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]))
        tensor([ True, False])
    """
    return batch.detach().isfinite().flatten(1).all(dim=1)


def non_finite_tensors(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that contain NaN or infinite values.

    Args:
        model: Any module.

    Examples:
        >>> layer = torch.nn.BatchNorm2d(2)
        >>> from equilibria.models.non_finite import non_finite_tensors
        >>> non_finite_tensors(layer)
        []
        >>> _ = layer.running_mean.fill_(torch.nan)
        >>> non_finite_tensors(layer)
        ['running_mean']
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        name
        for name, tensor in tensors
        if tensor.is_floating_point()
        and tensor.device.type != "meta"
        and not bool(tensor.detach().isfinite().all())
    ]


def listed(items: Sequence[object]) -> str:
    """Return the first `MAX_LISTED` items and the number of further ones, for a message."""
    shown = ", ".join(map(str, items[:MAX_LISTED]))
    more = len(items) - MAX_LISTED
    return shown if more <= 0 else f"{shown} and {more} more"


def guard(model: nn.Module) -> None:
    """Add checks for non-finite values to a model, in place.

    In training mode, a batch with NaN or infinite values raises `NonFiniteInputError` before any
    buffer changes. In evaluation mode, the outputs of such samples are NaN. The first forward pass
    and each `load_state_dict` warn about non-finite parameters and buffers.

    The checks are hooks of `model(x)` and are not part of exported graphs.

    Args:
        model: Model whose first input has shape (B, ...).
    """
    if getattr(model, "_is_guarded", False):
        return
    model._is_guarded = True  # type: ignore[assignment]
    model._is_checked = False  # type: ignore[assignment]
    # `model.features` calls the first layer alone, and inside a transform the model cannot read
    # the values.
    for module in {model, first_layer(model)}:
        module._refuses_non_finite = True  # type: ignore[assignment]
        module.register_forward_pre_hook(_refuse_non_finite)
    model.register_forward_pre_hook(_check_tensors_once)
    model.register_forward_hook(_mark_non_finite)
    model.register_load_state_dict_post_hook(_check_tensors)  # type: ignore[no-untyped-call]


def accept_non_finite(model: nn.Module) -> None:
    """Disable `NonFiniteInputError`, for searches that report the status of each sample.

    Args:
        model: Model whose samples do not depend on each other in training mode.
    """
    for module in model.modules():
        if hasattr(module, "_refuses_non_finite"):
            module._refuses_non_finite = False  # type: ignore[assignment]


def _refuse_non_finite(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    if layer.training and layer._refuses_non_finite:
        _check_samples(inputs)


@run_eagerly
def _check_samples(inputs: tuple[Any, ...]) -> None:
    """Raise `NonFiniteInputError` for a batch with NaN or infinite values, also if compiled."""
    batch = _batch(inputs)
    if batch is None:
        return
    if _is_surely_finite(batch):
        return
    finite = finite_samples(batch)
    if bool(finite.all()):
        return
    rows = (~finite).nonzero().squeeze(1).tolist()
    raise NonFiniteInputError(
        f"{len(rows)} of {len(finite)} samples hold NaN or infinite values ({listed(rows)}): "
        "remove them from the batch (images[eq.models.finite_samples(images)]), or let the "
        "training drop them (training.non_finite=drop)"
    )


def _check_tensors_once(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    if model._is_checked or torch.compiler.is_compiling():
        return
    _check_tensors(model)


def _check_tensors(model: nn.Module, keys: object = None) -> None:
    model._is_checked = True  # type: ignore[assignment]
    names = non_finite_tensors(model)
    if names:
        warn_caller(
            f"the model has NaN or infinite values in {listed(names)}, so its outputs are "
            "meaningless. Load an earlier checkpoint, or train again with finite images",
            NonFiniteWeightsWarning,
        )


def _mark_non_finite(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    batch = _batch(inputs)
    if batch is None or model.training or not isinstance(output, Tensor) or is_wrapped(output):
        return output
    if is_cheap_to_read(batch) and _is_surely_finite(batch):
        return output
    finite = finite_samples(batch)
    if len(output) != len(finite):  # Episodes (B, samples, ...) have one output per image.
        finite = finite.repeat_interleave(len(output) // len(finite))
    return output.masked_fill(~finite.reshape(-1, *[1] * (output.dim() - 1)), torch.nan)


def _is_surely_finite(batch: Tensor) -> bool:
    """Whether the sum of all values is finite, which is cheaper than to check each value."""
    return math.isfinite(batch.detach().sum())


def _batch(inputs: tuple[Any, ...]) -> Tensor | None:
    """Return the first input if it is a floating-point batch with readable values."""
    batch = inputs[0] if inputs else None
    if not isinstance(batch, Tensor) or not batch.is_floating_point() or batch.dim() < 2:
        return None
    if is_exporting() or torch.compiler.is_compiling() or is_tracing():  # type: ignore[no-untyped-call]
        return None
    if is_wrapped(batch) or batch.device.type == "meta" or not len(batch):
        return None
    return batch
