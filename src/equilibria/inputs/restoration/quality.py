"""How like its original a restored image is."""

from __future__ import annotations

from torch import Tensor

from equilibria.inputs.generation import psnr

MOST_DECIBEL = 120.0
"""What counts as no difference at all."""


def picture_psnr(images: Tensor, originals: Tensor) -> Tensor:
    """The PSNR of each image in decibel, as a viewer sees it: cut off to [0, 1], at most 120."""
    return psnr(images.clamp(0, 1), originals.clamp(0, 1)).clamp_max(MOST_DECIBEL)
