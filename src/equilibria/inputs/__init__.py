"""Searches over inputs: joint inference and input optimization, attacks, latents."""

from equilibria.inputs.attack_settings import AttackSettings, Method, Norm
from equilibria.inputs.attacks import AttackResult, adversarial_images, attack, measure_attack
from equilibria.inputs.constraints import Box, Constraint, L2Ball, LinfBall
from equilibria.inputs.engines import Engine, get_engine, list_engines, register_engine
from equilibria.inputs.input_result import InputResult
from equilibria.inputs.latents import (
    ExplicitGenerator,
    LatentSearch,
    Prior,
    decode,
    entries,
    find_latents,
    generator_of,
    is_generator,
    misfit,
    squared_error,
)
from equilibria.inputs.optimize import optimize_input
from equilibria.inputs.outer import Outer, optimal_input, optimal_value
from equilibria.inputs.robustness import (
    RobustnessCurves,
    certified_curve,
    curve_methods,
    measure_robustness,
)
from equilibria.inputs.search_settings import SearchSettings

__all__ = [
    "AttackResult",
    "AttackSettings",
    "Box",
    "Constraint",
    "Engine",
    "ExplicitGenerator",
    "InputResult",
    "L2Ball",
    "LatentSearch",
    "LinfBall",
    "Method",
    "Norm",
    "Outer",
    "Prior",
    "RobustnessCurves",
    "SearchSettings",
    "adversarial_images",
    "attack",
    "certified_curve",
    "curve_methods",
    "decode",
    "entries",
    "find_latents",
    "generator_of",
    "get_engine",
    "is_generator",
    "list_engines",
    "measure_attack",
    "measure_robustness",
    "misfit",
    "optimal_input",
    "optimal_value",
    "optimize_input",
    "register_engine",
    "squared_error",
]
