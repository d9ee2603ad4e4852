"""Plots of series such as "residual@10": curves, dots, and maps of matrices."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from equilibria.papers.measures import MEASURES, deviation
from equilibria.papers.table import Panel
from equilibria.report.style import (
    LEAST_FACTOR,
    LIGHT,
    SMALL,
    dress_axes,
    legend_columns,
    plain_axis,
    plain_log_axis,
    series,
)

MAX_MARKERS = 12
"""Largest number of points that are drawn as markers. Longer curves are lines with a band."""


def series_of(run: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the values of a series in a result by their positions, scaled for display."""
    scale = MEASURES[name].scale
    start = f"{name}@"
    return {key[len(start) :]: scale * run[key] for key in run if key.startswith(start)}


@dataclass(frozen=True)
class SeriesLine:
    """A panel that shows series of our runs.

    Attributes:
        panel: Description of the panel.
        rows: Labels and runs of the rows that have the series.
        width: Width in inches.
    """

    panel: Panel
    rows: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
    width: float

    @property
    def height(self) -> float:
        return 3.4

    def draw(self, part: Any) -> Sequence[Any]:
        """Plot the panel's series into a subfigure, and return the axes."""
        count = len(self.rows) if self.panel.form == "map" else 1
        axes = list(part.subplots(1, max(1, count), squeeze=False)[0])
        if self.panel.form == "map":
            self._draw_maps(part, axes)
            return axes
        (self._draw_dots if self.panel.form == "dots" else self._draw_curves)(axes[0])
        dress_axes(axes[0])
        handles, labels = axes[0].get_legend_handles_labels()
        if labels:
            part.legend(
                handles=handles, loc="outside lower center", frameon=False, fontsize=SMALL,
                ncols=legend_columns(labels, self.width),
            )  # fmt: skip
        return axes

    def _draw_curves(self, axis: Any) -> None:
        """Draw a curve per row and series: mean and standard deviation over seeds."""
        shown = [(row, name) for row in self.rows for name in self.panel.show]
        for at, ((label, runs), name) in enumerate(shown):
            curves = [series_of(run, name) for run in runs]
            places = sorted({place for curve in curves for place in curve}, key=float)
            by_place = [[curve[p] for curve in curves if p in curve] for p in places]
            means = [statistics.fmean(values) for values in by_place]
            spread = [deviation(values) for values in by_place]
            x = [float(place) for place in places]
            title = label if len(self.panel.show) == 1 else MEASURES[name].title
            style = {**series(at), "label": title}
            if len(places) <= MAX_MARKERS:
                axis.errorbar(x, means, yerr=spread, markersize=5, elinewidth=0.9, **style)
                continue
            axis.plot(x, means, **{**style, "marker": ""})
            band = zip(means, spread, strict=True)
            low, high = zip(*((max(m - s, m / 10), m + s) for m, s in band), strict=True)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        measure = MEASURES[self.panel.show[0]]
        axis.set(xlabel=self.panel.along, ylabel=self.panel.unit or measure.title)
        _scale(axis, "y", measure.log)

    def _draw_dots(self, axis: Any) -> None:
        """Draw one series over another for the first seed, one dot per position."""
        (shown,), over = self.panel.show, self.panel.over
        for at, (label, runs) in enumerate(self.rows):
            y, x = series_of(runs[0], shown), series_of(runs[0], over)
            both = [place for place in y if place in x]
            style = {**series(at), "linestyle": "none", "markersize": 4, "alpha": 0.6}
            axis.plot([x[p] for p in both], [y[p] for p in both], label=label, **style)
        axis.set(xlabel=MEASURES[over].title, ylabel=MEASURES[shown].title)
        _scale(axis, "x", MEASURES[over].log)
        _scale(axis, "y", MEASURES[shown].log)

    def _draw_maps(self, part: Any, axes: Sequence[Any]) -> None:
        """Draw one map per row for the first seed; positions are "row,column"."""
        (shown,) = self.panel.show
        image = None
        for axis, (label, runs) in zip(axes, self.rows, strict=True):
            values = series_of(runs[0], shown)
            indices = [tuple(map(int, place.split(","))) for place in values]
            size = 1 + max(max(pair) for pair in indices)
            matrix = [[values[f"{k},{l}"] for l in range(size)] for k in range(size)]  # noqa: E741
            image = axis.imshow(matrix, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            first, second = self.panel.along.split(" / ")
            axis.set(title=label, xlabel=first, ylabel=second)
            axis.tick_params(colors=LIGHT.ink, length=3)
        if image is not None:
            part.colorbar(image, ax=axes, shrink=0.8, label=MEASURES[shown].title)


def _scale(axis: Any, along: Literal["x", "y"], log: bool) -> None:
    values = [v for line in axis.lines for v in getattr(line, f"get_{along}data")() if v > 0]
    if not log or not values or max(values) <= LEAST_FACTOR * min(values):
        plain_axis(axis, along)
        return
    # Set the limits first, because the ticks depend on them.
    getattr(axis, f"set_{along}scale")("log")
    getattr(axis, f"set_{along}lim")(0.7 * min(values), 1.4 * max(values))
    plain_log_axis(axis, along)
