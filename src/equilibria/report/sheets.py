"""Sheets of images as PNG, with labels of rows and columns, and notes below the images."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from equilibria.data import DataSet, image_from_tensor
from equilibria.report.style import LIGHT, PAPER, SMALL, TITLE, drawing, figure_png, wrapped
from equilibria.tasks.image_quality import MAX_DECIBELS

if TYPE_CHECKING:
    from PIL.Image import Image

DOTS = 100
"""Resolution of a sheet, in pixels per inch."""
GAP = 6
"""Gap between images, and between images and texts, in pixels."""
LEAST_SIDE, MOST_SIDE = 72, 320
"""Limits of the longer side of an image in a sheet, in pixels. Smaller images are enlarged by an
integer factor, larger ones are reduced."""
LEAST_CELL, LEAST_WIDTH = 56, 240
"""Smallest width of a column and of a sheet, in pixels, which leaves room for texts."""
LETTERS = 15
"""Largest number of letters per line of a row's label."""


@dataclass(frozen=True)
class SheetRow:
    """Images of shape (B, 1 or 3, H, W) with values in [0, 1]; NaN is drawn gray."""

    label: str
    images: Tensor
    notes: Sequence[str] = ()
    """One text per image."""


@dataclass(frozen=True)
class Sheet:
    """Rows of images, with titles above the columns and a heading."""

    rows: Sequence[SheetRow]
    titles: Sequence[str] = ()
    heading: str = ""
    least_side: int = field(default=LEAST_SIDE, kw_only=True)

    def __post_init__(self) -> None:
        shapes = [tuple(row.images.shape) for row in self.rows]
        if not shapes or any(len(s) != 4 or 0 in s or s[1] not in (1, 3) for s in shapes):
            raise ValueError(
                "a sheet needs at least one row, and each row images of shape (B, 1 or 3, H, W); "
                f"got {', '.join(map(str, shapes)) or 'none'}"
            )

    def png(self) -> bytes:
        """Return the sheet as PNG."""
        return figure_png(self.figure(), DOTS)

    @drawing()
    def figure(self) -> Any:
        """Draw the sheet; everything is placed in whole pixels, so that no image is resampled."""
        from matplotlib.figure import Figure

        figure = Figure(facecolor=PAPER, dpi=DOTS)
        pictures = [[_pixels(image, self.least_side) for image in row.images] for row in self.rows]
        count = max(map(len, pictures))
        notes = [[*row.notes[:count]] for row in self.rows]
        texts = _Texts(figure)
        side = max(picture.width for row in pictures for picture in row)
        side = max(
            [LEAST_CELL, side, *(texts.size(note, SMALL)[0] for row in notes for note in row)]
        )
        letters = int(side / (0.72 * SMALL * DOTS / 72))
        titles = [wrapped(title, letters, 2) for title in self.titles[:count]]
        labels = [wrapped(row.label, LETTERS, 4) for row in self.rows]
        left = max(texts.size(label, SMALL)[0] for label in labels)
        left += 2 * GAP if left else GAP
        width = max(left + count * (side + GAP), LEAST_WIDTH)
        heading = wrapped(self.heading, int(width / (0.65 * TITLE * DOTS / 72)))
        top = GAP
        if heading:
            texts.put(heading, TITLE, GAP, top)
            top += texts.size(heading, TITLE)[1] + 2 * GAP
        if titles:
            below = top + max(texts.size(title, SMALL)[1] for title in titles)
            for column, title in enumerate(titles):
                middle = left + column * (side + GAP) + side / 2
                texts.put(title, SMALL, middle, below, "center", "bottom")
            top = below + GAP
        placed = []
        for row, label, row_notes in zip(pictures, labels, notes, strict=True):
            height = max(picture.height for picture in row)
            texts.put(label, SMALL, left - GAP, top + height / 2, "right", "center")
            for column, picture in enumerate(row):
                corner = left + column * (side + GAP)
                placed.append((picture, corner + (side - picture.width) // 2, top))
                if column < len(row_notes):
                    texts.put(
                        row_notes[column], SMALL, corner + side / 2, top + height + 2, "center"
                    )
            line = max((texts.size(note, SMALL)[1] for note in row_notes), default=0)
            top += max(height + (line + GAP if line else 0), texts.size(label, SMALL)[1]) + GAP
        # 0.01 pixels more, because matplotlib rounds down the product of inches and resolution.
        figure.set_size_inches((width + 0.01) / DOTS, (top + 0.01) / DOTS)
        for picture, x, y in placed:
            figure.figimage(np.asarray(picture), x, top - y - picture.height, origin="upper")
        texts.draw(width, top)
        return figure


class _Texts:
    """Texts with positions in pixels from the upper left corner."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure
        self.waiting: list[tuple[str, int, float, float, str, str]] = []
        self.known: dict[tuple[str, int], tuple[int, int]] = {}

    def size(self, text: str, points: int) -> tuple[int, int]:
        """Return width and height of a text in pixels."""
        if not text:
            return 0, 0
        if (text, points) not in self.known:
            trial = self.figure.text(0, 0, text, fontsize=points, parse_math=False)
            box = trial.get_window_extent()
            trial.remove()
            self.known[text, points] = math.ceil(box.width), math.ceil(box.height)
        return self.known[text, points]

    def put(
        self, text: str, points: int, x: float, y: float, across: str = "left", along: str = "top"
    ) -> None:
        if text:
            self.waiting.append((text, points, x, y, across, along))

    def draw(self, width: float, height: float) -> None:
        for text, points, x, y, across, along in self.waiting:
            self.figure.text(
                x / width,
                1 - y / height,
                text,
                fontsize=points,
                color=LIGHT.ink,
                horizontalalignment=across,
                verticalalignment=along,
                parse_math=False,
            )


def compared(label: str, images: Tensor, ratios: Sequence[float]) -> SheetRow:
    """Return a row of images with the PSNR of each below it; `ratios` may have more values."""
    return SheetRow(label, images, [decibels(ratio) for ratio in ratios[: len(images)]])


def decibels(ratio: float | None) -> str:
    """Format a PSNR; None, for an image without an original, gives an empty text."""
    if ratio is None:
        return ""
    if ratio >= MAX_DECIBELS:
        return "identical"
    return f"{ratio:.1f} dB" if math.isfinite(ratio) else "no answer"


def class_titles(data: DataSet, labels: Tensor) -> list[str]:
    """Return the class names of images as titles of columns; empty for data without classes.

    Examples:
        >>> from equilibria.report.sheets import class_titles
        >>> class_titles(eq.data.load_digits(), torch.tensor([3, 7]))
        ['3', '7']
    """
    if data.kind != "classification" or data.num_classes < 2:
        return []
    return [data.class_names[label] for label in labels.tolist()]


def image_png(image: Tensor) -> bytes:
    """Encode an image of shape (C, H, W) with values in [0, 1] as PNG, without resizing."""
    buffer = io.BytesIO()
    _as_picture(image).save(buffer, format="PNG")
    return buffer.getvalue()


def _as_picture(image: Tensor) -> Image:
    return image_from_tensor(image.detach().cpu().float().nan_to_num(0.5))


def _pixels(image: Tensor, least_side: int) -> Image:
    """Return an image in the size it has in the sheet."""
    from PIL import Image

    picture = _as_picture(image).convert("RGB")
    longest = max(picture.size)
    if longest < least_side:
        factor = float(math.ceil(least_side / longest))
        how = Image.Resampling.NEAREST
    else:
        factor, how = min(1.0, max(MOST_SIDE, least_side) / longest), Image.Resampling.LANCZOS
    width, height = (max(1, round(side * factor)) for side in picture.size)
    return picture.resize((width, height), how)
