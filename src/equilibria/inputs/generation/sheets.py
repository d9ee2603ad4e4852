"""Many small images as one picture."""

from __future__ import annotations

import io

import torch
from torch import Tensor

GAP = 2
"""Pixels between images."""


def sheet_png(rows: list[Tensor], *, scale: int = 2) -> bytes:
    """Batches of images with values in [0, 1], a row each, as a PNG."""
    from PIL import Image

    if not rows or any(row.dim() != 4 or row.shape[1] not in (1, 3) for row in rows):
        raise ValueError("a sheet takes batches of gray or colored images, one batch a row")
    _, channels, height, width = rows[0].shape
    columns = max(len(row) for row in rows)
    sheet = torch.ones(channels, len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for r, row in enumerate(rows):
        for c, image in enumerate(row.detach().cpu().float().clamp(0, 1)):
            top, left = r * (height + GAP), c * (width + GAP)
            sheet[:, top : top + height, left : left + width] = image
    pixels = (sheet * 255).round().to(torch.uint8).permute(1, 2, 0).squeeze(2).numpy()
    picture = Image.fromarray(pixels)
    picture = picture.resize(
        (picture.width * scale, picture.height * scale), Image.Resampling.NEAREST
    )
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def in_rows(images: Tensor, columns: int) -> list[Tensor]:
    """A batch as rows of a sheet."""
    return list(torch.split(images, columns))
