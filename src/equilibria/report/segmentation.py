"""Segmentations as PNG: predictions for test images beside the truth, and for image files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.data import image_to_tensor
from equilibria.data.image_files import as_pixels, open_image, readable
from equilibria.equilibrium import solving
from equilibria.report.figures import drawn_files
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
from equilibria.training.experiment import RecipeModel
from equilibria.training.files import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

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
LONGEST_SIDE = 1024
"""Longest side of a drawn segmentation, in pixels; larger images are reduced."""


@dataclass(frozen=True)
class PixelPrediction:
    """Classes of the pixels of one image file."""

    file: str
    drawn: str
    """File of the picture."""
    classes: dict[str, float]
    """Shares of the predicted classes in the pixels, the largest first; empty if the logits are not
    finite."""
    confidence: float
    """Mean over the pixels."""
    iterations: int | None
    """None for a model without an equilibrium, as `converged`."""
    converged: bool | None


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


@torch.no_grad()
def predict_pixels(
    run: RecipeModel,
    files: Sequence[Path],
    device: torch.device,
    output: Path,
    on_unreadable: Callable[[Exception], None] | None = None,
    *,
    top: int | None = None,
    overwrite: bool = False,
) -> Iterator[PixelPrediction]:
    """Segment image files and draw the classes of their pixels.

    Images are resized and cropped like the training images; the picture has the size of the cropped
    part in the file.

    Args:
        run: Trained segmentation model.
        files: Image files.
        device: Device of the computation.
        output: Folder of the pictures.
        on_unreadable: Called with the error of a file that cannot be read, which is then skipped.
        top: Largest number of classes in each result, those with most pixels first; None: all.
        overwrite: Replace pictures that exist.

    Yields:
        One result per file.
    """
    names, frame = run.images.class_names, run.images.frame
    output.mkdir(parents=True, exist_ok=True)

    def read(item: tuple[Path, tuple[Path, ...]]) -> tuple[Tensor, Image]:
        image = open_image(item[0], is_gray=run.images.is_gray)
        pixels = as_pixels(image_to_tensor(frame.apply(image)))
        return pixels[None].to(device), frame.region(image)

    items = zip(files, drawn_files(files, output, "classes", overwrite=overwrite), strict=True)
    for (path, (drawn,)), (inputs, image) in readable(items, read, on_unreadable):
        scale = min(1.0, LONGEST_SIDE / max(image.size))
        height, width = (max(1, round(side * scale)) for side in (image.height, image.width))
        with solving(run.model, record=True) as record:
            probabilities = run.model(inputs).float().softmax(dim=1).cpu()
        confidence, classes = F.interpolate(
            probabilities, (height, width), mode="bilinear", align_corners=False
        )[0].max(dim=0)
        pixels = as_pixels(image_to_tensor(image.resize((width, height))))
        classes = torch.where(confidence.isfinite(), classes, -1)
        counts = classes[classes >= 0].bincount(minlength=len(names))
        order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
        shares = {int(index): int(counts[index]) / classes.numel() for index in order}
        write_atomically(drawn, _prediction_png(pixels, classes, names, shares))
        solution = record.solutions[-1] if record.solutions else None
        yield PixelPrediction(
            file=str(path),
            drawn=str(drawn),
            classes={names[index]: share for index, share in list(shares.items())[:top]},
            confidence=float(confidence.mean()),
            iterations=None if solution is None else int(solution.iterations[0]),
            converged=None if solution is None else bool(solution.converged[0]),
        )


def _prediction_png(
    image: Tensor, classes: Tensor, class_names: Sequence[str], shares: Mapping[int, float]
) -> bytes:
    """Draw an image beside the classes of its pixels, and a legend with the share of each class.

    Args:
        image: Image with values in [0, 1], shape (1 or 3, H, W).
        classes: Classes of the pixels, shape (H, W); −1 where there is none.
        class_names: Names of the classes.
        shares: Share of the pixels by class.
    """
    height, width = classes.shape
    colors = distinct_colors(len(class_names))
    pixels = image.expand(3, -1, -1).movedim(0, 2)
    # Over a dark image, colors would not look like those of the legend.
    pale = DARKEST + (1 - DARKEST) * pixels
    overlay = _overlay(pale, classes, colors, opacity=0.6, ignore_index=-1)
    legend = {
        f"{class_names[index]}  {share:.1%}": colors[index] for index, share in shares.items()
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
