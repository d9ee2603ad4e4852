"""Step-by-step restoration of a noisy photograph for the explorer."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data.image_files import BRIGHTEST, as_pixels, decode_image, image_to_tensor
from equilibria.images import Framing
from equilibria.restoration import Denoising, PhotoRestorer
from equilibria.restoration.minimizer import Iteration
from equilibria.serving.answers import finite
from equilibria.serving.exploring import as_png

PHOTO_SIDE = 320
"""Maximum side length of a photograph in pixels, to keep restorations fast."""
DISPLAYED_ITERATIONS = (1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 80, 100, 130, 160)
"""Iterations whose image is sent; sending all would take longer than the restoration."""
Send = Callable[[dict[str, Any]], None]


def sample_photos() -> dict[str, Path]:
    """Return the photographs included in scikit-learn, by name."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "datasets" / "images"
    photos = {"temple": folder / "china.jpg", "flower": folder / "flower.jpg"}
    return {name: path for name, path in photos.items() if path.is_file()}


@torch.no_grad()
def restored_photo(content: bytes, noise: float, send: Send, seed: int = 0) -> dict[str, Any]:
    """Add noise to a photograph and restore it with the prior included in the package.

    Args:
        content: Content of the image file.
        noise: Standard deviation of the noise, as a fraction of the pixel range.
        send: Receives partial results: first the noisy image, then iterates.
        seed: Seed of the noise.

    Returns:
        The last iterate, with the bound on its distance from the exact minimizer in gray levels.
    """
    image = decode_image(content, is_gray=None, framing=Framing.make(PHOTO_SIDE))
    image.thumbnail((PHOTO_SIDE, PHOTO_SIDE))
    photo = as_pixels(image_to_tensor(image))[None]
    noisy = Denoising(noise=noise).corrupt(photo, torch.Generator().manual_seed(seed))
    send({"noisy": as_png(noisy.measured[0]), "before": _psnr(noisy.measured, photo)})

    def result(count: int, images: Tensor, objective: Tensor) -> dict[str, Any]:
        return {
            "iteration": count,
            "restored": as_png(images[0]),
            "after": _psnr(images, photo),
            "objective": finite(float(objective[0])),
        }

    def observe(step: Iteration) -> None:
        if step.count in DISPLAYED_ITERATIONS:
            send(result(step.count, step.images, step.objective()))

    restored = PhotoRestorer(strength=1.0).restore(noisy, observe=observe)
    bound = None if restored.bound is None else finite(BRIGHTEST * float(restored.bound))
    last = result(int(restored.iterations[0]), restored.images, restored.objective[-1])
    return {**last, "bound": bound}


def _psnr(images: Tensor, truth: Tensor) -> float | None:
    return finite(float(-10 * (images.clamp(0, 1) - truth).square().mean().log10()))
