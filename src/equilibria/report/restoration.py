"""Sheets of restored images: measurement, restoration, and objective along the solve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equilibria.report.sheets import MOST_SIDE, Sheet, SheetRow, compared, decibels
from equilibria.report.style import (
    LIGHT,
    TEXT,
    count_along,
    drawing,
    dress_axes,
    figure_png,
    wrapped,
)
from equilibria.restoration import Restored

SHOWN = 256
"""Largest side, in pixels, of the central crop of a photograph in its sheet."""
LEAST_SIDE = 160
"""Smallest longer side, in pixels, of an image in the sheet of a file. Large images are cropped to
their center, because noise is invisible in a reduced image."""
SHEET_WIDTH = 4.8
"""Width of the sheet of a photograph, in inches."""
COLUMNS = 10
"""Test images in a row of their sheet."""


def photo_sheet(name: str, restored: Restored, variation: Tensor | None = None) -> bytes:
    """Draw a photograph before and after restoration, and the objective along the solve, as PNG.

    The objective need not decrease in every iteration, because Anderson's method minimizes the
    residual. The line is the lowest value so far; the dots are the values of the iterates.

    Args:
        name: Name of the file.
        restored: Result of a restorer with a trace, for one image.
        variation: Restoration by total variation, for comparison.

    Examples:
        >>> problem = eq.restoration.Denoising(noise=0.1).corrupt(torch.rand(1, 1, 16, 16))
        >>> restored = eq.restoration.PhotoRestorer(trace=True).restore(problem)
        >>> from equilibria.report.restoration import photo_sheet
        >>> photo_sheet("noisy.png", restored)[1:4]
        b'PNG'
    """
    pictures = {
        "measured": restored.picture,
        "total variation": variation,
        "restored": restored.images,
    }
    shown = {title: batch for title, batch in pictures.items() if batch is not None}
    with drawing():
        from matplotlib.figure import Figure

        crops = {title: _center(images[0], SHOWN) for title, images in shown.items()}
        height, width = restored.images.shape[2:]
        # Two columns, with large type: the sheet is legible at the width of a phone.
        row = SHEET_WIDTH / 2 * min(max(height / width, 0.7), 1.5) + 0.35
        figure: Any = Figure(figsize=(SHEET_WIDTH, 2 * row + 0.45), layout="constrained")
        grid = figure.add_gridspec(2, 2)
        for index, (title, crop) in enumerate(crops.items()):
            axis = figure.add_subplot(grid[divmod(index, 2)])
            image = crop.clamp(0, 1).permute(1, 2, 0)
            gray = {"cmap": "gray", "vmin": 0, "vmax": 1} if image.shape[2] == 1 else {}
            pixels = (image.squeeze(2) if gray else image).numpy()
            axis.imshow(pixels, interpolation="nearest", **gray)
            axis.set_title(title)
            axis.set_axis_off()
        curve = figure.add_subplot(grid[1, 1] if len(shown) == 3 else grid[1, :])
        if restored.trace is not None and restored.best_trace is not None:
            lowest, values = restored.best_trace[:, 0], restored.trace[:, 0]
            curve.plot(lowest.numpy(), color=LIGHT.first, label="lowest so far")
            dots = {"linestyle": "none", "marker": "o", "markersize": 3}
            curve.plot(values.numpy(), color=LIGHT.second, label="each iteration", **dots)
            curve.legend(frameon=False)
        weight = "" if restored.strength in (None, 1) else f", λ = {restored.strength:.3g}"
        part = " (center)" if restored.traces_tile else ""
        curve.set_title(f"objective{part}{weight}")
        count_along(curve, "iteration")
        dress_axes(curve)
        figure.suptitle(wrapped(f"{name}: {restored.statement}", 64), fontsize=TEXT)
        return figure_png(figure)


def columns_sheet(
    name: str, images: Mapping[str, Tensor], ratios: Mapping[str, float | None]
) -> bytes:
    """Draw versions of one image (C, H, W) side by side, with the PSNR of each, as PNG."""
    columns = {title: _center(image, MOST_SIDE) for title, image in images.items()}
    notes = [decibels(ratios[title]) for title in columns]
    row = SheetRow("", torch.stack([*columns.values()]), notes)
    is_cut = max(max(image.shape[1:]) for image in images.values()) > MOST_SIDE
    heading = f"{name} (center)" if is_cut else name
    return Sheet([row], [*columns], heading, least_side=LEAST_SIDE).png()


def rows_sheet(
    heading: str,
    originals: Tensor,
    images: Mapping[str, Tensor | None],
    ratios: Mapping[str, Sequence[float]],
    titles: Sequence[str] = (),
) -> bytes:
    """Draw the first of several images in rows, as PNG.

    Args:
        heading: Text above the images.
        originals: Original images, which are the first row.
        images: Versions of them by label, one row each; None is left out.
        ratios: PSNR of the images of each version.
        titles: Titles of the columns.
    """
    rows = [SheetRow("original", originals[:COLUMNS])]
    rows += [
        compared(label, batch[:COLUMNS], ratios[label])
        for label, batch in images.items()
        if batch is not None
    ]
    return Sheet(rows, titles, heading).png()


def _center(image: Tensor, side: int) -> Tensor:
    top, left = (max(0, size - side) // 2 for size in image.shape[1:])
    return image[:, top : top + side, left : left + side]
