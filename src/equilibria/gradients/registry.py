"""Gradient rules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equilibria.gradients.base import GradientRule
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.truncated import OneStep, Phantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.registry import Registry

_rules: Registry[GradientRule] = Registry("gradient rule")
_rules.register("implicit", Implicit)
_rules.register("auto", Implicit)  # exact, its linear solver chosen by the cell's symmetry and size
_rules.register("phantom", Phantom)
_rules.register("one_step", OneStep)
_rules.register("unrolled", Unrolled)


def register_gradient(
    name: str, factory: Callable[..., GradientRule], *, replace: bool = False
) -> None:
    """Make a gradient rule available by name; `factory` takes its options as keywords."""
    _rules.register(name, factory, replace=replace)


def list_gradients() -> list[str]:
    return _rules.names()


def get_gradient(gradient: str | GradientRule, **options: Any) -> GradientRule:
    """The gradient rule called by a name, with options; a rule passes through."""
    if isinstance(gradient, GradientRule):
        return gradient
    return _rules.create(gradient, **options)
