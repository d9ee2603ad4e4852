"""Searches over inputs: joint inference and input optimization, attacks, latents, restoration."""

from equilibria.inputs.attack_settings import AttackSettings, Method, Norm
from equilibria.inputs.attacks import AttackResult, adversarial_images, attack, measure_attack
from equilibria.inputs.constraints import Box, Constraint, L2Ball, LinfBall
from equilibria.inputs.corruptions import (
    Corrupted,
    Corruption,
    Deblurring,
    Demosaicing,
    Denoising,
    Inpainting,
    Measured,
    Scattering,
    SuperResolution,
    answer,
    bayer_mosaic,
    get_corruption,
    list_corruptions,
    picture_of,
    register_corruption,
)
from equilibria.inputs.engines import Engine, get_engine, list_engines, register_engine
from equilibria.inputs.filling import seamless_fill
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
from equilibria.inputs.noise_level import noise_level
from equilibria.inputs.optimize import optimize_input
from equilibria.inputs.outer import Outer, optimal_input, optimal_value
from equilibria.inputs.photos import PhotoSettings, discrepancy, proven, restore_photo
from equilibria.inputs.restore import Restoration, restore
from equilibria.inputs.robustness import (
    RobustnessCurves,
    certified_curve,
    curve_methods,
    measure_robustness,
)
from equilibria.inputs.search_settings import SearchSettings
from equilibria.inputs.tiles import answer_in_tiles, takes_any_size
from equilibria.inputs.total_variation import least_variation

__all__ = [
    "AttackResult",
    "AttackSettings",
    "Box",
    "Constraint",
    "Corrupted",
    "Corruption",
    "Deblurring",
    "Demosaicing",
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
    "PhotoSettings",
    "Prior",
    "Restoration",
    "RobustnessCurves",
    "Scattering",
    "SearchSettings",
    "SuperResolution",
    "adversarial_images",
    "answer",
    "answer_in_tiles",
    "attack",
    "bayer_mosaic",
    "certified_curve",
    "curve_methods",
    "decode",
    "discrepancy",
    "entries",
    "find_latents",
    "generator_of",
    "get_corruption",
    "get_engine",
    "is_generator",
    "least_variation",
    "list_corruptions",
    "list_engines",
    "measure_attack",
    "measure_robustness",
    "misfit",
    "noise_level",
    "optimal_input",
    "optimal_value",
    "optimize_input",
    "picture_of",
    "proven",
    "register_corruption",
    "register_engine",
    "restore",
    "restore_photo",
    "seamless_fill",
    "squared_error",
    "takes_any_size",
]
