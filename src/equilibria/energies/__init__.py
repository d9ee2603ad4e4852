"""The smooth part E(y; x) of a hidden objective, term by term."""

from equilibria.energies.base import Energy, FunctionEnergy, Scaled, Sum, energy_term
from equilibria.energies.terms import Input, Quadratic

__all__ = ["Energy", "FunctionEnergy", "Input", "Quadratic", "Scaled", "Sum", "energy_term"]
