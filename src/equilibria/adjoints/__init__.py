"""Differentiating through an equilibrium: rules that pair with any solver."""

from equilibria.adjoints.base import BackwardLog, GradientRule, Map, Symmetry
from equilibria.adjoints.implicit import Implicit
from equilibria.adjoints.linear import LinearSolution, bicgstab, conjugate_gradients, gmres
from equilibria.adjoints.registry import get_adjoint, list_adjoints, register_adjoint
from equilibria.adjoints.truncated import OneStep, Phantom
from equilibria.adjoints.unrolled import Unrolled

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
    "get_adjoint",
    "gmres",
    "list_adjoints",
    "register_adjoint",
]
