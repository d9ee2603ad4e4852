"""Linear solvers for backward passes."""

from equilibria.solvers.linear.base import LinearMap, LinearSolution
from equilibria.solvers.linear.bicgstab import bicgstab
from equilibria.solvers.linear.conjugate_gradients import conjugate_gradients
from equilibria.solvers.linear.gmres import gmres

__all__ = ["LinearMap", "LinearSolution", "bicgstab", "conjugate_gradients", "gmres"]
