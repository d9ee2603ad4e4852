"""How well a trained generator samples and reconstructs."""

from __future__ import annotations

import torch

from equilibria.report.generation import generate
from equilibria.training import Experiment

LATENTS = 1000
IMAGES = 300


def generation(experiment: Experiment, device: torch.device) -> dict[str, float | None]:
    """FID of samples and of reconstructions, and PSNR, by the encoder and by JIIO."""
    found, _ = generate(experiment, device, latents=LATENTS, images=IMAGES)
    ways = {some.latents_by: some for some in found.reconstructions}
    # A decoder alone has no other way than JIIO, which is then its own.
    own = ways.get("encoder", ways.get("JIIO"))
    searched = ways.get("JIIO")
    return {
        "sample_fid": found.sample_fid,
        "reconstruction_fid": None if own is None else own.fid,
        "reconstruction_psnr": None if own is None else own.psnr,
        "jiio_reconstruction_fid": None if searched is None else searched.fid,
        "jiio_reconstruction_psnr": None if searched is None else searched.psnr,
    }
