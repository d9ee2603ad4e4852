"""Equilibrium layers: cells (fixed-point maps), and layers that solve them."""

from equilibria.equilibrium.bounds import StepBounds
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.energy_cell import EnergyCell
from equilibria.equilibrium.function_cell import FunctionCell, fixed_point
from equilibria.equilibrium.jacobian import jacobian_penalty, spectral_radius
from equilibria.equilibrium.layer import EquilibriumLayer
from equilibria.equilibrium.objective import NoObjectiveError, Objective
from equilibria.equilibrium.reporting import BatchCouplingWarning
from equilibria.equilibrium.solving import Solving, solving

__all__ = [
    "BatchCouplingWarning",
    "Cell",
    "EnergyCell",
    "EquilibriumLayer",
    "FunctionCell",
    "NoObjectiveError",
    "Objective",
    "Solving",
    "StepBounds",
    "fixed_point",
    "jacobian_penalty",
    "solving",
    "spectral_radius",
]
