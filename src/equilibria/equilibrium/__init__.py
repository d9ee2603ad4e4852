"""Equilibrium layers: cells (fixed-point maps), and layers that solve them."""

from equilibria.equilibrium.bounds import StepBounds
from equilibria.equilibrium.capabilities import EnergyForm
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.equilibrium.function_cell import FunctionCell, fixed_point
from equilibria.equilibrium.jacobian import jacobian_penalty, random_iterate, spectral_radius
from equilibria.equilibrium.layer import EquilibriumLayer, Inputs
from equilibria.equilibrium.objective import EnergyObjective, NoObjectiveError, Objective
from equilibria.equilibrium.reporting import BatchCouplingWarning
from equilibria.equilibrium.solving import Record, Solving, solving

__all__ = [
    "BatchCouplingWarning",
    "Cell",
    "EnergyCell",
    "EnergyForm",
    "EnergyObjective",
    "EquilibriumLayer",
    "FunctionCell",
    "Inputs",
    "NoObjectiveError",
    "Objective",
    "Record",
    "Solving",
    "StepBounds",
    "fixed_point",
    "jacobian_penalty",
    "random_iterate",
    "solving",
    "spectral_radius",
]
