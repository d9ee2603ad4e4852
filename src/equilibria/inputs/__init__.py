"""Searches over inputs: joint inference and input optimization, attacks, latents."""

from equilibria.inputs.attack_settings import AttackSettings
from equilibria.inputs.attacks import AttackResult, attack, measure_attack
from equilibria.inputs.constraints import Box, Constraint, L2Ball, LinfBall
from equilibria.inputs.engines import get_engine, list_engines, register_engine
from equilibria.inputs.engines.base import Engine
from equilibria.inputs.input_result import InputResult
from equilibria.inputs.latents import Prior, decode, find_latents
from equilibria.inputs.optimize import optimize_input
from equilibria.inputs.outer import optimal_input, optimal_value
from equilibria.inputs.robustness import RobustnessCurves, measure_robustness
from equilibria.inputs.search_settings import SearchSettings

__all__ = [
    "AttackResult",
    "AttackSettings",
    "Box",
    "Constraint",
    "Engine",
    "InputResult",
    "L2Ball",
    "LinfBall",
    "Prior",
    "RobustnessCurves",
    "SearchSettings",
    "attack",
    "decode",
    "find_latents",
    "get_engine",
    "list_engines",
    "measure_attack",
    "measure_robustness",
    "optimal_input",
    "optimal_value",
    "optimize_input",
    "register_engine",
]
