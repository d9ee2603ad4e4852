"""The smooth part E(y; x) of a hidden objective, term by term."""

from equilibria.energies.base import Energy, FunctionEnergy, Scaled, Sum, energy_term
from equilibria.energies.batch_regularizers import HSIC, Decorrelation
from equilibria.energies.branch_coupling import BranchCoupling, diversity, heritage
from equilibria.energies.branches import Branches
from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.heritage_diversity import HeritageDiversity
from equilibria.energies.kernels import PolynomialKernel, SigmoidKernel
from equilibria.energies.prior import Regularizer
from equilibria.energies.regularizers import (
    L1,
    L2,
    FeatureRegularizer,
    Incay,
    get_regularizer,
    list_regularizers,
    register_regularizer,
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
    "get_regularizer",
    "heritage",
    "list_regularizers",
    "register_regularizer",
]
