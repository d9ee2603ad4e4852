"""Gradient rules, which differentiate an equilibrium with any solver."""

from equilibria.gradients.approximate import OneStep, Phantom, Unrolled
from equilibria.gradients.base import GradientRule, Symmetry
from equilibria.gradients.implicit import Implicit
from equilibria.registry import Registry

__all__ = [
    "GradientRule",
    "Implicit",
    "OneStep",
    "Phantom",
    "Symmetry",
    "Unrolled",
    "get_gradient",
    "list_gradients",
    "register_gradient",
]

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
