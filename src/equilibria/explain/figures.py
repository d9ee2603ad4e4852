"""Figures as SVG, each for a light and a dark page; matplotlib is imported where it is used."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.explain.convergence import Convergence
from equilibria.training import EpochMetrics

MOST_THIN_LINES = 24


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

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
    panels = 1 if picard.objective is None else 2
    return _themed(panels, lambda axes, theme: _draw_convergence(axes, theme, picard, other))


def training_figure(history: Sequence[EpochMetrics]) -> ThemedFigure:
    """Loss and, for equilibrium models, the mean number of iterations over the epochs."""
    panels = 1 if history[0].mean_iterations is None else 2
    return _themed(panels, lambda axes, theme: _draw_training(axes, theme, history))


def image_png(image: Tensor) -> bytes:
    """A `(channels, height, width)` image with values in [0, 1] as a PNG of its own size."""
    from matplotlib.image import imsave

    pixels = image.detach().cpu().float().clamp(0, 1)
    array = pixels[0] if pixels.shape[0] == 1 else pixels.permute(1, 2, 0)
    buffer = io.BytesIO()
    imsave(buffer, array.numpy(), cmap="gray", vmin=0, vmax=1, format="png")
    return buffer.getvalue()


def _draw_convergence(
    axes: list[Any], theme: Theme, picard: Convergence, other: Convergence | None
) -> None:
    if picard.objective is not None:
        axis = axes[0]
        values = picard.objective.cpu()
        excess = values - values[-1]
        _bundle(axis, excess, theme.first, "mean over the images")
        axis.set_title("Hidden objective above its minimum")
        axis.set_ylabel("G(yₖ) − G(y*)")
        _logarithmic(axis, excess.mean(dim=1)[:-1])
    axis = axes[-1]
    _bundle(axis, picard.residual.cpu(), theme.first, picard.solver)
    if other is not None:
        mean = other.residual.cpu().mean(dim=1)
        axis.plot(mean, color=theme.second, linewidth=2, label=other.solver)
    guaranteed = picard.guaranteed_residual()
    if guaranteed is not None:
        axis.plot(
            guaranteed,
            color=theme.third,
            linestyle="--",
            linewidth=1.4,
            label=f"guaranteed: qᵏ, q = {picard.contraction:.3f}",
        )
    axis.set_title("Residual")
    axis.set_ylabel("‖yₖ − T(yₖ)‖")
    _logarithmic(axis, picard.residual.cpu().mean(dim=1))
    for axis in axes:
        axis.set_xlabel("iteration k")
        _legend(axis, theme)


def _draw_training(axes: list[Any], theme: Theme, history: Sequence[EpochMetrics]) -> None:
    epochs = [metrics.epoch for metrics in history]
    marker = "o" if len(history) == 1 else None
    axes[0].plot(epochs, [m.loss for m in history], color=theme.first, linewidth=2, marker=marker)
    axes[0].set_title("Training loss")
    axes[0].set_ylabel("cross-entropy")
    axes[0].set_yscale("log")
    if len(axes) > 1:
        iterations = [m.mean_iterations or 0.0 for m in history]
        axes[1].plot(epochs, iterations, color=theme.second, linewidth=2, marker=marker)
        axes[1].set_title("Iterations to the equilibrium")
        axes[1].set_ylabel("mean over the training images")
        axes[1].set_ylim(bottom=0)
    for axis in axes:
        axis.set_xlabel("epoch")


def _bundle(axis: Any, values: Tensor, color: str, label: str) -> None:
    """A thin line a sample, and their mean."""
    for column in values.unbind(dim=1)[:MOST_THIN_LINES]:
        axis.plot(column, color=color, linewidth=0.6, alpha=0.22)
    axis.plot(values.mean(dim=1), color=color, linewidth=2.2, label=label)


def _logarithmic(axis: Any, mean: Tensor) -> None:
    """A logarithmic axis that ends where the mean does, not where single samples hit zero."""
    axis.set_yscale("log")
    positive = mean[mean > 0]
    if len(positive):
        axis.set_ylim(float(positive.min()) / 5, float(positive.max()) * 5)


def _legend(axis: Any, theme: Theme) -> None:
    axis.legend(frameon=False, labelcolor=theme.ink, fontsize=9)


def _themed(panels: int, draw: Callable[[list[Any], Theme], None]) -> ThemedFigure:
    return ThemedFigure(light=_svg(panels, LIGHT, draw), dark=_svg(panels, DARK, draw))


def _svg(panels: int, theme: Theme, draw: Callable[[list[Any], Theme], None]) -> bytes:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The salt makes the names inside the SVG, and so the file, the same on every run.
    style = {"svg.hashsalt": "equilibria", "font.family": "DejaVu Sans", "font.size": 10}
    with rc_context(style), torch.no_grad():
        figure = Figure(figsize=(4.6 * panels if panels > 1 else 6.4, 3.3), layout="constrained")
        axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
        draw(axes, theme)
        for axis in axes:
            _dress(axis, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _dress(axis: Any, theme: Theme) -> None:
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
