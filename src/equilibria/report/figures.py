"""Figures of a report, as SVG for light and dark, wide and narrow pages; pictures of attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.inputs import AttackResult
from equilibria.report.convergence import Convergence
from equilibria.report.style import (
    DARK,
    LIGHT,
    SMALL,
    TEXT,
    TITLE,
    Theme,
    count_along,
    drawing,
    dress_axes,
    figure_png,
    figure_svg,
    plain_axis,
    plain_log_axis,
    wrapped,
)
from equilibria.training import EpochMetrics

MOST_THIN_LINES = 24
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.5
"""Of a wide page, in inches; panels stand side by side."""
NARROW_WIDTH, NARROW_HEIGHT = 3.8, 3.1
"""Of a page on a phone, where they stand below each other: there a point is a pixel about."""
ATTACKED_IMAGES = 8
WRONG = "#c62828"


@dataclass(frozen=True)
class ThemedFigure:
    """The same figure as SVG, for light and for dark pages; narrow: for those of a phone."""

    light: bytes
    dark: bytes
    narrow_light: bytes
    narrow_dark: bytes

    def files(self, name: str) -> dict[str, bytes]:
        """By the names of files."""
        return {
            f"{name}-{kind.replace('_', '-')}.svg": content for kind, content in vars(self).items()
        }


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
                fontsize=SMALL,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.2),
                ncols=3,
                columnspacing=1.0,
                handlelength=1.4,
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
            plain_axis(axes[1])
        for axis in axes:
            count_along(axis, "epoch")

    return _themed(1 if history[0].mean_iterations is None else 2, draw)


@drawing()
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
    figure = Figure(figsize=(1.5 * len(chosen) + 0.4, 5.4), layout="constrained")
    axes = figure.subplots(3, len(chosen), squeeze=False, subplot_kw={"xticks": [], "yticks": []})
    for column, index in enumerate(chosen):
        panels = (
            ("image", images[index], int(before[index])),
            (f"change × {0.5 / reach:.2g}", 0.5 + 0.5 * change[index] / reach, None),
            ("attacked", result.images[index], int(after[index])),
        )
        for axis, (name, panel, predicted) in zip(axes[:, column], panels, strict=True):
            pixels = panel.detach().cpu().float().clamp(0, 1).movedim(0, 2).numpy()
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.spines[:].set_visible(False)
            if predicted is not None:
                said = "no answer" if predicted == -1 else f"says {class_names[predicted]}"
                is_right = predicted == int(result.labels[index])
                axis.set_title(
                    wrapped(said, 14, 2),
                    fontsize=TEXT,
                    color=LIGHT.ink if is_right else WRONG,
                    fontweight="normal" if is_right else "bold",
                    parse_math=False,
                )
            if column == 0:
                axis.set_ylabel(name, fontsize=TITLE)
    return figure_png(figure)


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


@torch.no_grad()
def _themed(panels: int, draw: Callable[[list[Any], Theme], None]) -> ThemedFigure:
    wide = (PANEL_WIDTH * panels if panels > 1 else 1.4 * PANEL_WIDTH, PANEL_HEIGHT)
    light = _svg((1, panels), wide, draw)
    narrow = _svg((panels, 1), (NARROW_WIDTH, NARROW_HEIGHT * panels), draw)
    return ThemedFigure(light, _darkened(light), narrow, _darkened(narrow))


def _svg(
    grid: tuple[int, int], size: tuple[float, float], draw: Callable[[list[Any], Theme], None]
) -> bytes:
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(*grid, squeeze=False).flat)
        draw(axes, LIGHT)
        for axis in axes:
            dress_axes(axis)
        return figure_svg(figure)


def _darkened(svg: bytes) -> bytes:
    """The same figure in the colors of a dark page."""
    for name, color in vars(LIGHT).items():
        svg = svg.replace(color.encode(), getattr(DARK, name).encode())
    return svg
