"""Equilibria as layers: the cell contract, and cell + solver + gradient rule."""

from equilibria.equilibrium.cell import Cell, EnergyCell
from equilibria.equilibrium.jacobian import jacobian_penalty, random_iterate, spectral_radius
from equilibria.equilibrium.layer import BatchCouplingWarning, EquilibriumLayer, Inputs
from equilibria.equilibrium.objective import EnergyObjective, NoObjectiveError, Objective
from equilibria.equilibrium.solving import Record, Solving, solving

__all__ = [
    "BatchCouplingWarning",
    "Cell",
    "EnergyCell",
    "EnergyObjective",
    "EquilibriumLayer",
    "Inputs",
    "NoObjectiveError",
    "Objective",
    "Record",
    "Solving",
    "jacobian_penalty",
    "random_iterate",
    "solving",
    "spectral_radius",
]
