"""Models by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equilibria.models.normalization import normalize_first
from equilibria.registry import Registry, current_names


@dataclass(frozen=True)
class ModelCard:
    """What is known of a named model before it is built."""

    name: str
    summary: str = ""
    paper: str = ""
    """Where the model, or the comparison with it, is published."""
    reported: str = ""
    """The number of parameters that the paper reports."""


_models: Registry[nn.Module] = Registry("model")
_presets: dict[str, dict[str, Any]] = {}
_cards: dict[str, ModelCard] = {}


def register_model(
    name: str,
    factory: Callable[..., nn.Module],
    *,
    summary: str = "",
    paper: str = "",
    reported: str = "",
    replace: bool = False,
    **preset: Any,
) -> None:
    """Make a model available by name: `factory` called with `preset` and the user's overrides.

    `summary` is the line that lists of models show; `paper` and `reported` say where it comes from
    and how many parameters it has there.
    """
    _models.register(name, factory, replace=replace)
    _presets[name] = preset
    _cards[name] = ModelCard(name, summary, paper, reported)


def model_card(name: str) -> ModelCard:
    """What is known of a model before it is built."""
    _models.factory(name)
    return _cards[name]


def list_models() -> list[str]:
    return _models.names()


def create_model(
    name: str,
    *,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    **overrides: Any,
) -> nn.Module:
    """The model called `name`, with options overridden.

    A model takes pixels in [0, 1]; `normalize`, the mean and the standard deviation of every
    channel, brings them to mean 0 and variance 1 in its first layer. All
    models take num_classes and in_channels, equilibrium models also tolerance and max_iterations;
    `model_options(name)` lists the rest. An unknown name or option is an error that names the
    nearest one.
    """
    factory = _models.factory(name)
    known = model_options(name)
    overrides = current_names(overrides, known)
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(factory).parameters.values()
    )
    for option in overrides:
        if option not in known and not takes_any:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"model {name!r} has no option {option!r}{hint} It has: {', '.join(known)}."
            )
    model = factory(**{**_presets[name], **overrides})
    if normalize is not None:
        normalize_first(model, *normalize)
    return model


def model_outline(name: str, **overrides: Any) -> nn.Module:
    """The model without memory for its parameters: its structure and sizes, made at once."""
    with torch.device("meta"):
        return create_model(name, **overrides)


def parameter_count(model: nn.Module) -> int:
    """How many trainable numbers a model has."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def model_options(name: str) -> dict[str, Any]:
    """The options of a model with their values."""
    parameters = inspect.signature(_models.factory(name)).parameters.values()
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return {p.name: _presets[name].get(p.name, p.default) for p in named} | _presets[name]
