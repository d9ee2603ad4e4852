"""Gradient rules by name."""

from __future__ import annotations

from equilibria.gradients.base import GradientRule
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.truncated import OneStep, Phantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.registry import Registry

_gradients: Registry[GradientRule] = Registry(
    "gradient rule",
    GradientRule,
    {
        "auto": Implicit,
        "implicit": Implicit,
        "phantom": Phantom,
        "one_step": OneStep,
        "unrolled": Unrolled,
    },
)
register_gradient = _gradients.register
list_gradients = _gradients.names
get_gradient = _gradients.resolve
