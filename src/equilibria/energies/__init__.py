"""The smooth part E(y; x) of a hidden objective, term by term."""

from equilibria.energies.base import Energy, FunctionEnergy, Scaled, Sum, energy_term
from equilibria.energies.branch_coupling import BranchCoupling, diversity, heritage
from equilibria.energies.branches import Branches
from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.heritage_diversity import HeritageDiversity
from equilibria.energies.kernels import PolynomialKernel, SigmoidKernel
from equilibria.energies.regularizers import (
    HSIC,
    L1,
    L2,
    Decorrelation,
    FeatureRegularizer,
    Incay,
    Regularizer,
)
from equilibria.energies.terms import Input, Quadratic

__all__ = [
    "HSIC",
    "L1",
    "L2",
    "BranchCoupling",
    "Branches",
    "Decorrelation",
    "Energy",
    "FeatureRegularizer",
    "FunctionEnergy",
    "GaussianKernel",
    "HeritageDiversity",
    "Incay",
    "Input",
    "PolynomialKernel",
    "Quadratic",
    "Regularizer",
    "Scaled",
    "SigmoidKernel",
    "Sum",
    "diversity",
    "energy_term",
    "heritage",
]
