"""Finding fixed points: small solvers in one loop, with an honest per-sample result."""

from equilibria.solvers.accelerated import Accelerated
from equilibria.solvers.anderson import Anderson
from equilibria.solvers.anderson_type_one import AndersonTypeOne
from equilibria.solvers.auto import Auto
from equilibria.solvers.base import Memory, Solver
from equilibria.solvers.broyden import Broyden
from equilibria.solvers.picard import Picard
from equilibria.solvers.problem import FixedPointProblem
from equilibria.solvers.registry import get_solver, list_solvers, register_solver
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
    "FixedPointProblem",
    "Memory",
    "Picard",
    "Solution",
    "Solver",
    "Status",
    "Trace",
    "get_solver",
    "list_solvers",
    "register_solver",
]
