"""What the explorer shows of a photograph: how noise leaves it, step by step."""

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
"""Of a photograph, so that an answer comes soon."""
SHOWN = (1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66, 80, 100, 130, 160)
"""Iterations of which the picture is shown on the way: to draw all would take longer than these."""
Tell = Callable[[dict[str, Any]], None]


def sample_photos() -> dict[str, Path]:
    """Photographs that scikit-learn brings along, by name."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "datasets" / "images"
    named = {"temple": folder / "china.jpg", "flower": folder / "flower.jpg"}
    return {name: path for name, path in named.items() if path.is_file()}


@torch.no_grad()
def restored_photo(content: bytes, noise: float, tell: Tell, seed: int = 0) -> dict[str, Any]:
    """A photograph with noise added, and what the prior that comes with the package makes of it.

    tell: is told what the page can show on the way: the noisy picture at once, then iterates.
    """
    image = decode_image(content, is_gray=None, framing=Framing.make(PHOTO_SIDE))
    image.thumbnail((PHOTO_SIDE, PHOTO_SIDE))
    photo = as_pixels(image_to_tensor(image))[None]
    seen = Denoising(noise=noise).corrupt(photo, torch.Generator().manual_seed(seed))
    tell({"seen": as_png(seen.measured[0]), "before": _psnr(seen.measured, photo)})

    def shown(count: int, images: Tensor, objective: Tensor) -> dict[str, Any]:
        return {
            "iteration": count,
            "restored": as_png(images[0]),
            "after": _psnr(images, photo),
            "objective": finite(float(objective[0])),
        }

    def observe(step: Iteration) -> None:
        if step.count in SHOWN:
            tell(shown(step.count, step.images, step.objective()))

    restored = PhotoRestorer(strength=1.0).restore(seen, observe=observe)
    bound = None if restored.bound is None else finite(BRIGHTEST * float(restored.bound))
    last = shown(int(restored.iterations[0]), restored.images, restored.objective[-1])
    return {**last, "bound": bound}


def _psnr(images: Tensor, truth: Tensor) -> float | None:
    return finite(float(-10 * (images.clamp(0, 1) - truth).square().mean().log10()))
