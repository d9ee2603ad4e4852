"""Differentiating through an equilibrium: rules that pair with any solver."""

from equilibria.gradients.base import BackwardLog, GradientRule, Map, Symmetry
from equilibria.gradients.implicit import Implicit
from equilibria.gradients.registry import get_gradient, list_gradients, register_gradient
from equilibria.gradients.truncated import OneStep, Phantom
from equilibria.gradients.unrolled import Unrolled
from equilibria.solvers.linear import LinearSolution, bicgstab, conjugate_gradients, gmres

__all__ = [
    "BackwardLog",
    "GradientRule",
    "Implicit",
    "LinearSolution",
    "Map",
    "OneStep",
    "Phantom",
    "Symmetry",
    "Unrolled",
    "bicgstab",
    "conjugate_gradients",
    "get_gradient",
    "gmres",
    "list_gradients",
    "register_gradient",
]
