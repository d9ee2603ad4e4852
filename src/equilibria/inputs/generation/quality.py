"""How near images are to others: PSNR of pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def psnr(images: Tensor, references: Tensor, *, peak: float = 1.0) -> Tensor:
    """10 log₁₀(peak² ÷ mean squared error) of each pair, in decibels; infinite where equal."""
    if images.shape != references.shape or images.dim() < 2:
        raise ValueError(
            f"expected two batches of one shape, not {tuple(images.shape)} and "
            f"{tuple(references.shape)}"
        )
    error = (images.double() - references.double()).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(peak**2 / error)
