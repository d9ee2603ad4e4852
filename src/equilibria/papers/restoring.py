"""What a generator restores that was never trained for it."""

from __future__ import annotations

from typing import Any

import torch

from equilibria.data import Batches
from equilibria.inputs.restoration import (
    Corruption,
    Denoising,
    Inpainting,
    is_generator,
    picture_psnr,
    restore,
)
from equilibria.models.autoencoders import Autoencoder
from equilibria.tasks import ImageRestoration
from equilibria.training import Experiment

IMAGES = 64
ADAM_STEPS = 40
SEED = 0
RIDGE = 0.01
HIDDEN = 20 / 64
"""The side of the hidden window, as a share of the image's."""
DAMAGES: dict[str, Corruption] = {
    "inpaint": Inpainting(window=HIDDEN),
    "denoise_02": Denoising(noise=0.2),
    "denoise_04": Denoising(noise=0.4),
}


def unsupervised_psnr(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """The median PSNR of what a generator makes of damaged test images (Eq. 22)."""
    model = experiment.model
    if isinstance(experiment.task, ImageRestoration):
        return {}
    if not (is_generator(model) or isinstance(model, Autoencoder)):
        return {}
    images = next(iter(Batches(experiment.test, IMAGES)))[0].to(device)
    # The paper searches the latents of autoencoders by Adam.
    search: dict[str, Any] = (
        {"engine": "adam", "iterations": ADAM_STEPS} if isinstance(model, Autoencoder) else {}
    )
    found: dict[str, float | None] = {}
    for name, damage in DAMAGES.items():
        seen = damage.corrupt(images, torch.Generator().manual_seed(SEED))
        restored = restore(model, seen.measured, seen.measurement, ridge=RIDGE, **search)
        found[f"{name}_psnr"] = float(picture_psnr(restored.images, images).median())
        found[f"{name}_converged"] = float(restored.converged.double().mean())
    return found
