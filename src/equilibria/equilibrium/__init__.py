"""Equilibria as layers: the cell contract, and cell + solver + gradient rule."""

from equilibria.equilibrium.cell import Cell, EnergyCell
from equilibria.equilibrium.jacobian import jacobian_penalty, random_iterate, spectral_radius
from equilibria.equilibrium.layer import BatchCouplingWarning, EquilibriumLayer

__all__ = [
    "BatchCouplingWarning",
    "Cell",
    "EnergyCell",
    "EquilibriumLayer",
    "jacobian_penalty",
    "random_iterate",
    "spectral_radius",
]
