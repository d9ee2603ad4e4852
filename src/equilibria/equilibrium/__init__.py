"""Equilibria as layers: the cell contract, and cell + solver + gradient rule."""

from equilibria.equilibrium.cell import Cell, EnergyCell
from equilibria.equilibrium.jacobian import jacobian_penalty, spectral_radius
from equilibria.equilibrium.layer import EquilibriumLayer

__all__ = ["Cell", "EnergyCell", "EquilibriumLayer", "jacobian_penalty", "spectral_radius"]
