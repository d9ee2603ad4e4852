"""Joint inference and input optimization: the best input of an equilibrium network."""

from equilibria.inputs.joint.constraints import Box, Constraint, Intersection, L2Ball, LinfBall
from equilibria.inputs.joint.engines import Engine, get_engine, list_engines, register_engine
from equilibria.inputs.joint.optimize import optimize_input
from equilibria.inputs.joint.outer import optimal_input, optimal_value
from equilibria.inputs.joint.result import InputResult

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
