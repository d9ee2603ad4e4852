"""Joint inference and input optimisation: the best input of an equilibrium network."""

from equilibria.joint.constraints import Box, Constraint, Intersection, L2Ball, LinfBall
from equilibria.joint.engines import Engine, get_engine, list_engines, register_engine
from equilibria.joint.optimize import optimize_input
from equilibria.joint.outer import optimal_input, optimal_value
from equilibria.joint.result import InputResult

__all__ = [
    "Box",
    "Constraint",
    "Engine",
    "InputResult",
    "Intersection",
    "L2Ball",
    "LinfBall",
    "get_engine",
    "list_engines",
    "optimal_input",
    "optimal_value",
    "optimize_input",
    "register_engine",
]
