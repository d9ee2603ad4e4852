"""Gradient rules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from equilibria.adjoints.base import GradientRule
from equilibria.adjoints.implicit import Implicit
from equilibria.adjoints.truncated import OneStep, Phantom
from equilibria.adjoints.unrolled import Unrolled
from equilibria.registry import Registry

_rules: Registry[GradientRule] = Registry("adjoint")
_rules.register("implicit", Implicit)
_rules.register("auto", Implicit)  # exact, its linear solver chosen by the cell's symmetry and size
_rules.register("phantom", Phantom)
_rules.register("one_step", OneStep)
_rules.register("unrolled", Unrolled)


def register_adjoint(
    name: str, factory: Callable[..., GradientRule], *, replace: bool = False
) -> None:
    """Make a gradient rule available by name; `factory` takes its options as keywords."""
    _rules.register(name, factory, replace=replace)


def list_adjoints() -> list[str]:
    return _rules.names()


def get_adjoint(adjoint: str | GradientRule, **options: Any) -> GradientRule:
    """The gradient rule called by a name, with options; a rule passes through."""
    if isinstance(adjoint, GradientRule):
        return adjoint
    return _rules.create(adjoint, **options)
