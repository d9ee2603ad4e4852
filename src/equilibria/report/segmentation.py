"""Segmentations as PNG: predictions for test images beside the truth, and for image files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from equilibria.analysis.segmentation import SegmentedImage
from equilibria.report.style import (
    DOTS,
    LIGHT,
    PAPER,
    SMALL,
    TITLE,
    drawing,
    figure_png,
    legend_below,
    legend_columns,
)

Color: TypeAlias = tuple[float, float, float]
"""Red, green and blue in [0, 1]."""

UNLABELLED = (0.82, 0.84, 0.87)
WRONG = (0.85, 0.12, 0.12)
FIRST_COLORS = (
    *("#5b8def", "#f2a33a", "#3fae5a", "#8e5bd0", "#29c3c9", "#f5e04b"),
    *("#e07bc4", "#8a5a2b", "#b5d96c", "#1f3f8f", "#0f6b5c", "#f7c6a3"),
)
PANELS = ("image", "truth", "prediction", "errors")
PANEL_WIDTH = 2.6
"""Width of a panel of a test image, in inches."""
LARGE_PANEL = 4.2
"""Side of a square panel of an image file, in inches."""
DARKEST = 0.3
"""Gray value that black has below the colors of classes."""


def segmentation_png(
    images: Tensor,
    labels: Tensor,
    predictions: Tensor,
    class_names: Sequence[str],
    *,
    ignore_index: int = 255,
    opacity: float = 0.65,
) -> bytes:
    """Draw images, true classes, predicted classes, and errors, one row per image, as PNG.

    Args:
        images: Images with values in [0, 1], not normalized, shape (B, 1 or 3, H, W).
        labels: True classes of the pixels, shape (B, H, W).
        predictions: Predicted classes of the pixels, shape (B, H, W).
        class_names: Names of the classes.
        ignore_index: Label of pixels without a class.
        opacity: Opacity of the classes over the gray image, in [0, 1].

    Raises:
        ValueError: If shapes do not match, or `opacity` is not in [0, 1].

    Examples:
        >>> images, labels = torch.rand(1, 3, 8, 8), torch.zeros(1, 8, 8, dtype=torch.long)
        >>> from equilibria.report.segmentation import segmentation_png
        >>> segmentation_png(images, labels, labels, ["sky", "road"])[1:4]
        b'PNG'
    """
    shape = (len(images), *images.shape[2:])
    if images.dim() != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise ValueError(
            "images must have shape (B, 1 or 3, H, W) with B of at least 1, got "
            f"{tuple(images.shape)}"
        )
    if labels.shape != shape or predictions.shape != shape:
        raise ValueError(
            f"labels and predictions must have shape {shape}, got {tuple(labels.shape)} and "
            f"{tuple(predictions.shape)}"
        )
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity must be in [0, 1], got {opacity}")
    colors = distinct_colors(len(class_names))
    truths, predicted = labels.cpu().long(), predictions.cpu().long()
    rows, notes = [], []
    shades = images.detach().cpu().float().clamp(0, 1)
    for image, truth, prediction in zip(shades, truths, predicted, strict=True):
        pixels = image.expand(3, -1, -1).movedim(0, 2)
        is_labelled = truth != ignore_index
        wrong = (truth != prediction) & is_labelled
        overlays = [
            _overlay(pixels, classes, colors, opacity, ignore_index)
            for classes in (truth, prediction)
        ]
        rows.append([pixels, *overlays, _errors(pixels, wrong, ~is_labelled)])
        notes.append(f"{int(wrong.sum()) / max(1, int(is_labelled.sum())):.1%} of pixels wrong")
    shown = sorted({*truths.flatten().tolist(), *predicted.flatten().tolist()} - {ignore_index})
    legend = {class_names[index]: colors[index] for index in shown} | {"wrong": WRONG}
    if bool((truths == ignore_index).any()):
        legend["unlabelled"] = UNLABELLED
    return _sheet(PANELS, rows, legend, PANEL_WIDTH, notes)


def prediction_png(segmented: SegmentedImage, class_names: Sequence[str]) -> bytes:
    """Draw an image beside the classes of its pixels, and a legend with their shares, as PNG."""
    classes = segmented.classes
    height, width = classes.shape
    colors = distinct_colors(len(class_names))
    pixels = segmented.image.expand(3, -1, -1).movedim(0, 2)
    # Over a dark image, colors would not look like those of the legend.
    pale = DARKEST + (1 - DARKEST) * pixels
    overlay = _overlay(pale, classes, colors, opacity=0.6, ignore_index=-1)
    legend = {
        f"{class_names[index]}  {share:.1%}": colors[index]
        for index, share in segmented.shares.items()
    }
    if bool((classes < 0).any()):
        legend["no answer"] = UNLABELLED
    # The area of a panel does not depend on the proportions of the image.
    panel_width = LARGE_PANEL * math.sqrt(min(max(width / height, 0.2), 5.0))
    return _sheet(("image", "classes"), [[pixels, overlay]], legend, panel_width)


@drawing()
def _sheet(
    titles: Sequence[str],
    rows: Sequence[Sequence[Tensor]],
    legend: Mapping[str, Color],
    panel_width: float,
    notes: Sequence[str] = (),
) -> bytes:
    """Draw titled rows of panels, a note below the last panel of each row, and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    width, columns = panel_width * len(titles), len(titles)
    height, side = rows[0][0].shape[:2]
    in_line = legend_columns(list(legend), width, mark=0.55)
    legend_height = 0.25 * math.ceil(len(legend) / in_line) + 0.15
    figure = Figure(
        figsize=(width, (panel_width * height / side + 0.25) * len(rows) + legend_height + 0.05),
        facecolor=PAPER,
        layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06),
    )
    # Small images are enlarged without smoothing: they stay sharp, and the file is half as large.
    how = "nearest" if side < panel_width * DOTS else "antialiased"
    for index, panel in enumerate(panel for row in rows for panel in row):
        axis = figure.add_subplot(len(rows), columns, index + 1)
        axis.imshow(panel.numpy(), interpolation=how)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        if index < columns:
            axis.set_title(titles[index], color=LIGHT.ink, fontsize=TITLE)
        if notes and index % columns == columns - 1:
            axis.set_xlabel(notes[index // columns], color=LIGHT.ink, fontsize=SMALL)
    patches = [Patch(color=color, label=label) for label, color in legend.items()]
    legend_below(figure, patches, in_line)
    return figure_png(figure)


def distinct_colors(count: int) -> list[Color]:
    """Return colors that are easy to distinguish, from each other and from the red of errors.

    The first twelve are `FIRST_COLORS`; the hues of the others are spaced by the golden angle.
    """
    from colorsys import hsv_to_rgb

    from matplotlib.colors import to_rgb

    golden = 0.618033988749895
    more = (
        hsv_to_rgb(0.05 + 0.88 * (golden * i % 1), 0.85 - 0.3 * (i % 2), 0.95 - 0.2 * (i % 3))
        for i in range(count - len(FIRST_COLORS))
    )
    return [*(to_rgb(color) for color in FIRST_COLORS[:count]), *more]


def _overlay(
    pixels: Tensor, classes: Tensor, colors: Sequence[Color], opacity: float, ignore_index: int
) -> Tensor:
    """Color the classes over the gray image, whose own colors would be mistaken for classes."""
    unlabelled = classes == ignore_index
    color = torch.tensor(colors)[classes.masked_fill(unlabelled, 0)]
    mixed = (1 - opacity) * pixels.mean(dim=2, keepdim=True) + opacity * color
    return torch.where(unlabelled[..., None], torch.tensor(UNLABELLED), mixed)


def _errors(pixels: Tensor, wrong: Tensor, unlabelled: Tensor) -> Tensor:
    """Color the errors over the image in pale gray."""
    pale = (0.6 + 0.4 * pixels.mean(dim=2, keepdim=True)).expand_as(pixels)
    pale = torch.where(unlabelled[..., None], torch.tensor(UNLABELLED), pale)
    return torch.where(wrong[..., None], torch.tensor(WRONG), pale)
