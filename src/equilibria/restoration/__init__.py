"""Restoration of damaged images: tasks by name, the learned prior of photographs, trained models.

Start with `damage.py` (the tasks), `photo.py` (how a photograph is restored) and `minimizer.py`
(the objective and its solve).
"""

from equilibria.restoration.damage import (
    Damage,
    Deblurring,
    Demosaicing,
    Denoising,
    Inpainting,
    Measured,
    Scattering,
    SuperResolution,
    get_damage,
    list_damages,
    register_damage,
)
from equilibria.restoration.fill import seamless_fill
from equilibria.restoration.generators import Restoration, restore
from equilibria.restoration.minimizer import PhotoMinimizer
from equilibria.restoration.noise import noise_level
from equilibria.restoration.photo import PhotoRestorer
from equilibria.restoration.photons import Poisson
from equilibria.restoration.problem import RestorationProblem
from equilibria.restoration.restorer import Restored, Restorer
from equilibria.restoration.tiles import answer_in_tiles

__all__ = [
    "Damage",
    "Deblurring",
    "Demosaicing",
    "Denoising",
    "Inpainting",
    "Measured",
    "PhotoMinimizer",
    "PhotoRestorer",
    "Poisson",
    "Restoration",
    "RestorationProblem",
    "Restored",
    "Restorer",
    "Scattering",
    "SuperResolution",
    "answer_in_tiles",
    "get_damage",
    "list_damages",
    "noise_level",
    "register_damage",
    "restore",
    "seamless_fill",
]
