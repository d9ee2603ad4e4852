"""Differentiating through an equilibrium: rules that pair with any solver."""

from equilibria.gradients.base import Backward, BackwardLog, GradientRule, Map, Symmetry
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.registry import get_gradient, list_gradients, register_gradient
from equilibria.gradients.truncated import OneStep, Phantom
from equilibria.gradients.unrolled import Unrolled

__all__ = [
    "Backward",
    "BackwardLog",
    "GradientRule",
    "Implicit",
    "Map",
    "OneStep",
    "Phantom",
    "Symmetry",
    "Unrolled",
    "get_gradient",
    "list_gradients",
    "register_gradient",
]
