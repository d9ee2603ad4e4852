"""Restoration of damaged images: tasks by name, the learned prior of photographs, trained models.

Start with `damage.py` (the tasks), `photo.py` (how a photograph is restored) and `minimizer.py`
(the objective and its solve).
"""

from equilibria.restoration.damage import (
    Corruption,
    Deblurring,
    Demosaicing,
    Denoising,
    Inpainting,
    Measured,
    Scattering,
    SuperResolution,
    get_corruption,
    list_corruptions,
    register_corruption,
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
    "Corruption",
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
    "get_corruption",
    "list_corruptions",
    "noise_level",
    "register_corruption",
    "restore",
    "seamless_fill",
]
