"""Synthetic photos of two classes: bright at the top, or bright at the bottom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

KINDS = ("Himmel", "земля")


def photo(kind: int, seed: int, size: tuple[int, int] = (12, 16)) -> Image.Image:
    """Return a noisy photo of this height and width, bluish where it is bright."""
    rng = np.random.default_rng((kind, seed))
    shades = np.linspace(200, 40, size[0])[:, None, None] * np.array([0.5, 0.7, 1.0])
    noise = rng.normal(0, 20, (*size, 3))
    pixels = (shades if kind == 0 else shades[::-1]) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_photos(folder: Path, count: int = 10, kinds: tuple[str, ...] = KINDS) -> Path:
    """Write one folder per class with `count` images of different sizes and file formats."""
    suffixes = ("png", "jpg", "webp", "gif", "tif")
    for kind, name in enumerate(kinds):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            image = photo(kind, i, (12 + i % 3, 16 + i % 2))
            image.save(folder / name / f"image {i:02}.{suffixes[i % len(suffixes)]}")
    return folder
