"""The smooth part E(y; x) of a hidden objective, term by term."""

from equilibria.energies.base import Energy, FunctionEnergy, Scaled, Sum, energy_term
from equilibria.energies.regularisers import (
    L1,
    L2,
    Decorrelation,
    FeatureRegulariser,
    Incay,
    Regulariser,
)
from equilibria.energies.terms import Input, Quadratic

__all__ = [
    "L1",
    "L2",
    "Decorrelation",
    "Energy",
    "FeatureRegulariser",
    "FunctionEnergy",
    "Incay",
    "Input",
    "Quadratic",
    "Regulariser",
    "Scaled",
    "Sum",
    "energy_term",
]
