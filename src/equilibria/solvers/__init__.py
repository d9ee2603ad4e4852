"""Solvers for fixed points and linear systems, with a status for every sample."""

from equilibria.registry import Registry
from equilibria.solvers.accelerated import Accelerated
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.anderson_type_one import AndersonTypeOne
from equilibria.solvers.auto import Auto
from equilibria.solvers.base import Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.convergence import Iterate, RelativeResidual, StoppingCriterion
from equilibria.solvers.linear.bicgstab import bicgstab
from equilibria.solvers.linear.conjugate_gradients import conjugate_gradients
from equilibria.solvers.linear.gmres import gmres
from equilibria.solvers.method import Method
from equilibria.solvers.minimize.base import Minimizer
from equilibria.solvers.minimize.descent import Descent
from equilibria.solvers.picard import Picard
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.sam import SAM
from equilibria.solvers.solution import (
    ConvergenceError,
    ConvergenceWarning,
    Solution,
    Status,
    Trace,
)

__all__ = [
    "SAM",
    "Accelerated",
    "Anderson",
    "AndersonTypeOne",
    "Auto",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "Descent",
    "FixedPointProblem",
    "Iterate",
    "Method",
    "Minimizer",
    "Picard",
    "RelativeResidual",
    "Solution",
    "Solver",
    "Status",
    "StoppingCriterion",
    "Trace",
    "bicgstab",
    "conjugate_gradients",
    "get_solver",
    "gmres",
    "list_solvers",
    "register_solver",
]

_solvers: Registry[Method] = Registry(
    "solver",
    Method,
    {
        "picard": Picard,
        "accelerated": Accelerated,
        "anderson": Anderson,
        "anderson1": AndersonTypeOne,
        "broyden": Broyden,
        "sam": SAM,
        "descent": Descent,
        "auto": Auto,
    },
)
register_solver = _solvers.register
list_solvers = _solvers.names
get_solver = _solvers.resolve
