"""Figures: as SVG for light and dark pages, and as PNG; matplotlib is imported where it is used."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs import AttackResult
from equilibria.report.convergence import Convergence
from equilibria.training import EpochMetrics

MOST_THIN_LINES = 24
PAPER = "#ffffff"
LETTER = 0.085
"""The width of a letter of a legend, in inches."""
GAP = 2
"""Pixels between the images of a grid."""
ATTACKED_IMAGES = 8
WRONG = "#c62828"


@dataclass(frozen=True)
class Theme:
    """The colors of a page."""

    ink: str
    faint: str
    first: str
    second: str
    third: str


LIGHT = Theme(ink="#24292f", faint="#d0d7de", first="#2563eb", second="#d9480f", third="#57606a")
DARK = Theme(ink="#d6dde6", faint="#3a424d", first="#7aa7ff", second="#ff9e64", third="#9aa5b1")


@dataclass(frozen=True)
class ThemedFigure:
    """The same figure as SVG, for light and for dark pages."""

    light: bytes
    dark: bytes


def convergence_figure(picard: Convergence, other: Convergence | None = None) -> ThemedFigure:
    """Objective (where there is one) and residual along a Picard solve; `other` for comparison."""

    def draw(axes: list[Any], theme: Theme) -> None:
        excess = picard.excess()
        if excess is not None:
            _bundle(axes[0], excess, picard.stops, theme.first, picard.solver)
            axes[0].set_title("Hidden objective above its minimum")
            axes[0].set_ylabel("objective − minimum")
        axis = axes[-1]
        _bundle(axis, picard.residual, picard.stops, theme.first, picard.solver)
        if other is not None:
            _mean_line(axis, other.residual, other.stops, theme.second, other.solver)
        proven = picard.proven_residual()
        if proven is not None:
            label = f"proven: qᵏ, q = {picard.contraction:.2f}"
            axis.plot(proven, color=theme.third, linestyle="--", linewidth=1.4, label=label)
        axis.set_title("Residual")
        axis.set_ylabel("‖yₖ − T(yₖ)‖")
        for axis in axes:
            axis.set_yscale("log")
            count_along(axis, "iteration k")
            axis.legend(
                frameon=False,
                labelcolor=theme.ink,
                fontsize=9,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.2),
                ncol=3,
                columnspacing=1.2,
            )

    return _themed(1 if picard.objective is None else 2, draw)


def training_figure(history: Sequence[EpochMetrics]) -> ThemedFigure:
    """Loss and, for equilibrium models, the mean number of iterations over the epochs."""

    def draw(axes: list[Any], theme: Theme) -> None:
        epochs = [metrics.epoch for metrics in history]
        # A single epoch is a point, which a line does not show.
        style = {"linewidth": 2.2, "marker": "o" if len(history) == 1 else None}
        axes[0].plot(epochs, [metrics.loss for metrics in history], color=theme.first, **style)
        axes[0].set_title("Training loss")
        axes[0].set_ylabel("cross-entropy")
        plain_log_axis(axes[0])
        if len(axes) > 1:
            iterations = [metrics.mean_iterations or 0.0 for metrics in history]
            axes[1].plot(epochs, iterations, color=theme.second, **style)
            axes[1].set_title("Iterations to the equilibrium")
            axes[1].set_ylabel("mean")
            axes[1].set_ylim(0, 1.15 * max(iterations))
        for axis in axes:
            count_along(axis, "epoch")

    return _themed(1 if history[0].mean_iterations is None else 2, draw)


def image_png(image: Tensor) -> bytes:
    """A `(channels, height, width)` image with values in [0, 1] as a PNG of its own size."""
    return image_grid_png([image[None]], scale=1)


def image_grid_png(rows: Sequence[Tensor], *, scale: int = 2) -> bytes:
    """Batches of images with values in [0, 1], a row each, as a PNG."""
    from PIL import Image

    if not rows or any(row.dim() != 4 or row.shape[1] not in (1, 3) for row in rows):
        raise ValueError("a grid takes batches of gray or colored images, one batch a row")
    _, channels, height, width = rows[0].shape
    columns = max(len(row) for row in rows)
    grid = torch.ones(channels, len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for r, row in enumerate(rows):
        for c, image in enumerate(row.detach().cpu().float().clamp(0, 1)):
            top, left = r * (height + GAP), c * (width + GAP)
            grid[:, top : top + height, left : left + width] = image
    pixels = (grid * 255).round().to(torch.uint8).permute(1, 2, 0).squeeze(2).numpy()
    picture = Image.fromarray(pixels)
    size = (picture.width * scale, picture.height * scale)
    buffer = io.BytesIO()
    picture.resize(size, Image.Resampling.NEAREST).save(buffer, format="PNG")
    return buffer.getvalue()


def attack_png(images: Tensor, result: AttackResult, class_names: Sequence[str]) -> bytes:
    """Some images, what was added to them (magnified), and what the model then says."""
    from matplotlib.figure import Figure

    # Images that the attack turned, then those that withstood it.
    before, after = result.initial_predictions, result.predictions
    right = before == result.labels
    order = [right & result.success, right & ~result.success, ~right]
    chosen = [int(i) for kind in order for i in kind.nonzero().squeeze(1)][:ATTACKED_IMAGES]
    change = (result.images - images.to(result.images)).cpu()
    reach = float(change[chosen].abs().max()) or 1.0
    figure = Figure(figsize=(1.5 * len(chosen), 5.4), layout="constrained")
    axes = figure.subplots(3, len(chosen), squeeze=False, subplot_kw={"xticks": [], "yticks": []})
    for column, index in enumerate(chosen):
        panels = (
            ("image", images[index], int(before[index])),
            ("change", 0.5 + 0.5 * change[index] / reach, None),
            ("attacked", result.images[index], int(after[index])),
        )
        for axis, (name, panel, predicted) in zip(axes[:, column], panels, strict=True):
            pixels = panel.detach().cpu().float().clamp(0, 1).movedim(0, 2).numpy()
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            caption = f"× {0.5 / reach:.2g}" if predicted is None else class_names[predicted]
            caption = "no answer" if predicted == -1 else caption
            is_right = predicted is None or predicted == int(result.labels[index])
            axis.set_title(caption, fontsize=9, color=LIGHT.ink if is_right else WRONG)
            if column == 0:
                axis.set_ylabel(name, fontsize=10)
    return figure_png(figure, 110)


def figure_png(figure: Any, dots_per_inch: int) -> bytes:
    """As a PNG; without the version of the library in it, equal figures are equal files."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()


def drawn_files(
    files: Sequence[Path], folder: Path, *kinds: str, overwrite: bool = False
) -> list[tuple[Path, ...]]:
    """Where the pictures of each file go, one a kind; no image is written over.

    A picture has the name of its image; a number tells those of the same name apart. Pictures of
    before are an error unless `overwrite` allows to replace them.
    """
    taken = {file.resolve() for file in files}
    found = []
    for file in files:
        for number in count(1):
            stem = file.stem if number == 1 else f"{file.stem}-{number}"
            paths = tuple(folder / f"{stem}-{kind}.png" for kind in kinds)
            places = {path.resolve() for path in paths}
            if not taken & places:
                break
        there = next((path for path in paths if path.exists()), None)
        if there is not None and not overwrite:
            raise FileExistsError(
                f"{there} exists: --overwrite (overwrite=True) replaces it, or name another folder"
            )
        taken |= places
        found.append(paths)
    return found


def _bundle(axis: Any, values: Tensor, stops: Tensor, color: str, label: str) -> None:
    """A thin line a sample, up to where it converged, and their mean."""
    columns = list(zip(values.unbind(dim=1), stops.tolist(), strict=True))
    for column, stop in columns[:MOST_THIN_LINES]:
        axis.plot(column[:stop], color=color, linewidth=0.6, alpha=0.25)
    _mean_line(axis, values, stops, color, label)


def _mean_line(axis: Any, values: Tensor, stops: Tensor, color: str, label: str) -> None:
    """The mean as long as all samples run: after that it would mix values of different times."""
    mean = values[: int(stops.min())].nanmean(dim=1)
    axis.plot(mean, color=color, linewidth=2.2, label=label)


def count_along(axis: Any, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def plain_log_axis(axis: Any) -> None:
    """A logarithmic axis whose ticks are numbers that one reads at once: 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def legend_columns(labels: Sequence[str], width: float, *, mark: float = 0.7) -> int:
    """How many columns of a legend fit into a width; in inches, as that of the mark at a label."""
    columns = int(width / (LETTER * max(map(len, labels)) + mark))
    return max(1, min(len(labels), columns))


def legend_below(figure: Any, handles: list[Any], columns: int, *, size: int = 10) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=size,
        labelcolor=LIGHT.ink,
    )


def _themed(panels: int, draw: Callable[[list[Any], Theme], None]) -> ThemedFigure:
    return ThemedFigure(light=_svg(panels, LIGHT, draw), dark=_svg(panels, DARK, draw))


def _svg(panels: int, theme: Theme, draw: Callable[[list[Any], Theme], None]) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The salt makes the names inside the SVG, and so the file, the same on every run.
    style: dict[Any, Any] = {
        "svg.hashsalt": "equilibria",
        "font.family": "DejaVu Sans",
        "font.size": 10,
    }
    with rc_context(style), torch.no_grad():
        figure = Figure(figsize=(4.6 * panels if panels > 1 else 6.4, 3.5), layout="constrained")
        axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
        draw(axes, theme)
        for axis in axes:
            dress_axes(axis, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def dress_axes(axis: Any, theme: Theme) -> None:
    axis.title.set_color(theme.ink)
    axis.title.set_fontsize(11)
    axis.xaxis.label.set_color(theme.ink)
    axis.yaxis.label.set_color(theme.ink)
    axis.tick_params(colors=theme.ink, which="both", length=3)
    axis.tick_params(which="minor", length=0)
    axis.grid(color=theme.faint, linewidth=0.6)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_color(theme.faint)
        spine.set_visible(side in ("left", "bottom"))
