"""Searches over inputs: joint inference and input optimization, attacks, latents, restoration."""

from equilibria.inputs.attack_settings import AttackSettings, Method, Norm
from equilibria.inputs.attacks import AttackResult, adversarial_images, attack, measure_attack
from equilibria.inputs.constraints import Box, Constraint, L2Ball, LinfBall
from equilibria.inputs.corruptions import (
    Corrupted,
    Corruption,
    Deblurring,
    Denoising,
    Inpainting,
    Measured,
    SuperResolution,
    answer,
    get_corruption,
    list_corruptions,
    picture_of,
    register_corruption,
)
from equilibria.inputs.engines import Engine, get_engine, list_engines, register_engine
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
from equilibria.inputs.optimize import InputResult, optimize_input
from equilibria.inputs.outer import Outer, optimal_input, optimal_value
from equilibria.inputs.restore import Restoration, restore
from equilibria.inputs.robustness import (
    CurvePoint,
    RobustnessCurves,
    certified_curve,
    curve_methods,
    measure_robustness,
)
from equilibria.inputs.tiles import answer_in_tiles, takes_any_size

__all__ = [
    "AttackResult",
    "AttackSettings",
    "Box",
    "Constraint",
    "Corrupted",
    "Corruption",
    "CurvePoint",
    "Deblurring",
    "Denoising",
    "Engine",
    "ExplicitGenerator",
    "Inpainting",
    "InputResult",
    "L2Ball",
    "LatentSearch",
    "LinfBall",
    "Measured",
    "Method",
    "Norm",
    "Outer",
    "Prior",
    "Restoration",
    "RobustnessCurves",
    "SuperResolution",
    "adversarial_images",
    "answer",
    "answer_in_tiles",
    "attack",
    "certified_curve",
    "curve_methods",
    "decode",
    "entries",
    "find_latents",
    "generator_of",
    "get_corruption",
    "get_engine",
    "is_generator",
    "list_corruptions",
    "list_engines",
    "measure_attack",
    "measure_robustness",
    "misfit",
    "optimal_input",
    "optimal_value",
    "optimize_input",
    "picture_of",
    "register_corruption",
    "register_engine",
    "restore",
    "squared_error",
    "takes_any_size",
]
