"""Linear solvers for backward passes."""

from equilibria.adjoints.linear.bicgstab import bicgstab
from equilibria.adjoints.linear.conjugate_gradients import conjugate_gradients
from equilibria.adjoints.linear.gmres import gmres
from equilibria.adjoints.linear.result import LinearMap, LinearSolution

__all__ = ["LinearMap", "LinearSolution", "bicgstab", "conjugate_gradients", "gmres"]
