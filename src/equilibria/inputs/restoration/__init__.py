"""Inverse problems: images from what was measured of them."""

from equilibria.inputs.restoration.answer import answer
from equilibria.inputs.restoration.corruptions import (
    Corrupted,
    Corruption,
    Deblurring,
    Denoising,
    Inpainting,
    Measured,
    SuperResolution,
    get_corruption,
    list_corruptions,
    register_corruption,
)
from equilibria.inputs.restoration.generators import (
    ExplicitGenerator,
    generator_of,
    is_generator,
    latent_dim,
)
from equilibria.inputs.restoration.measurements import (
    Blur,
    Downsampling,
    Everything,
    LinearMeasurement,
    Mask,
    Measurement,
    picture_of,
    transpose,
)
from equilibria.inputs.restoration.quality import picture_psnr
from equilibria.inputs.restoration.restore import (
    LatentSearch,
    Restoration,
    entries,
    misfit,
    restore,
)

__all__ = [
    "Blur",
    "Corrupted",
    "Corruption",
    "Deblurring",
    "Denoising",
    "Downsampling",
    "Everything",
    "ExplicitGenerator",
    "Inpainting",
    "LatentSearch",
    "LinearMeasurement",
    "Mask",
    "Measured",
    "Measurement",
    "Restoration",
    "SuperResolution",
    "answer",
    "entries",
    "generator_of",
    "get_corruption",
    "is_generator",
    "latent_dim",
    "list_corruptions",
    "misfit",
    "picture_of",
    "picture_psnr",
    "register_corruption",
    "restore",
    "transpose",
]
