"""Models by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from equilibria.registry import Registry

_models: Registry[nn.Module] = Registry("model")
_presets: dict[str, dict[str, Any]] = {}
_summaries: dict[str, str] = {}


def register_model(
    name: str,
    factory: Callable[..., nn.Module],
    *,
    summary: str = "",
    replace: bool = False,
    **preset: Any,
) -> None:
    """Make a model available by name: `factory` called with `preset` and the user's overrides.

    `summary` is the line that lists of models show.
    """
    _models.register(name, factory, replace=replace)
    _presets[name] = preset
    _summaries[name] = summary


def model_summary(name: str) -> str:
    """One line on a model."""
    _models.factory(name)
    return _summaries[name]


def list_models() -> list[str]:
    return _models.names()


def create_model(name: str, **overrides: Any) -> nn.Module:
    """The model called `name`, with options overridden.

    All models take num_classes, in_channels, tolerance and max_iterations; `model_options(name)`
    lists the rest. An unknown name or option is an error that names the nearest one.
    """
    factory = _models.factory(name)
    known = model_options(name)
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
    return factory(**{**_presets[name], **overrides})


def model_options(name: str) -> dict[str, Any]:
    """The options of a model with their values."""
    parameters = inspect.signature(_models.factory(name)).parameters.values()
    named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return {p.name: _presets[name].get(p.name, p.default) for p in named} | _presets[name]
