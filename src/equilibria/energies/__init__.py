"""Energy terms: the smooth part E(y; x) of a hidden objective."""

from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.branch_coupling import BranchCoupling
from equilibria.energies.convex_potential import ConvexPotential
from equilibria.energies.curvature import curvature
from equilibria.energies.facts import Facts
from equilibria.energies.fidelity import DataFidelity
from equilibria.energies.function import energy_term
from equilibria.energies.gaussian import GaussianKernel
from equilibria.energies.heritage_diversity import HeritageDiversity
from equilibria.energies.kernels import PolynomialKernel, SigmoidKernel
from equilibria.energies.opponent import OpponentPrior
from equilibria.energies.regularizers import (
    HSIC,
    L1,
    L2,
    Decorrelation,
    FeatureRegularizer,
    Incay,
    Regularizer,
    get_regularizer,
    list_regularizers,
    register_regularizer,
)
from equilibria.energies.ridge import RidgePrior
from equilibria.energies.terms import Branches, Input, Quadratic

__all__ = [
    "HSIC",
    "L1",
    "L2",
    "Bounds",
    "BranchCoupling",
    "Branches",
    "ConvexPotential",
    "DataFidelity",
    "Decorrelation",
    "Energy",
    "Facts",
    "FeatureRegularizer",
    "GaussianKernel",
    "HeritageDiversity",
    "Incay",
    "Input",
    "OpponentPrior",
    "PolynomialKernel",
    "Quadratic",
    "Regularizer",
    "RidgePrior",
    "SigmoidKernel",
    "curvature",
    "energy_term",
    "get_regularizer",
    "list_regularizers",
    "register_regularizer",
]
