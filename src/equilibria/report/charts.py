"""SVG charts of report pages, drawn by matplotlib in the colors of the page.

Each is as wide as a phone screen; on wider screens a page shows them side by side.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from equilibria.report.style import LIGHT, Theme, drawing, dress_axes, figure_svg

WIDTH, HEIGHT = 360.0, 210.0
"""Width of a chart, and height of its axes, in CSS pixels."""
LEFT, RIGHT, TOP, BELOW = 46.0, 18.0, 44.0, 40.0
"""Margins around the axes, in CSS pixels."""
LINE = 18.0
"""Height of a line of the legend, in CSS pixels."""
LETTER = 6.4
"""Approximate width of a letter of the legend, in CSS pixels."""
DOTS_PER_INCH = 72.0
"""Resolution of an SVG by matplotlib: one point per pixel."""
STEPS = [1, 2, 2.5, 5, 10]
TITLE, TEXT = 14, 12
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Verdana, Arial, sans-serif"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Kind = Literal["line", "dashed", "thin", "dots", "area"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of a curve; those that are not finite, or not positive on a log axis, are omitted."""

    points: Sequence[Point]
    label: str = ""
    """Text in the legend; empty for no entry."""
    color: str = "first"
    """Name of a color of `Theme`."""
    kind: Kind = "line"
    """Style; "area" is a step function: a value holds from the previous point to its own."""


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    description: str
    """Alternative text for screen readers."""
    log: bool = False
    """Whether the y-axis is logarithmic."""
    integer_x: bool = False
    """Whether ticks of the x-axis are whole numbers."""
    limits: tuple[float, float] | None = None
    """Limits of the y-axis; by default those of the points."""

    def svg(self, theme: Theme = LIGHT) -> str:
        """Return the chart as an SVG element with a description."""
        described = escape(self.description)
        drawn = recolored(self.drawn(), theme)
        head = f'<svg role="img" aria-label="{described}"'
        return drawn.replace("<svg", head, 1).replace(">", f"><title>{described}</title>", 1)

    @property
    def height(self) -> float:
        """Height of the chart with its legend, in pixels."""
        rows = -(-len(self._labels()) // self._legend_columns()) if self._labels() else 0
        return TOP + HEIGHT + BELOW + LINE * rows + 4

    def drawn(self) -> str:
        """Return the chart as an SVG element in light colors."""
        from matplotlib.figure import Figure

        with drawing():
            figure = Figure(figsize=(WIDTH / DOTS_PER_INCH, self.height / DOTS_PER_INCH))
            self._draw(figure)
            return _inline(figure_svg(figure).decode())

    def _draw(self, figure: Any) -> None:
        size = ((WIDTH - LEFT - RIGHT) / WIDTH, HEIGHT / self.height)
        axes = figure.add_axes((LEFT / WIDTH, 1 - (TOP + HEIGHT) / self.height, *size))
        points = [point for curve in self.series for point in self._drawable(curve)]
        points = points or [(0.0, 1.0)]
        low, high = self._scale(axes, points)
        for curve in self.series:
            inside = [(x, min(high, max(low, y))) for x, y in self._drawable(curve)]
            _draw_series(axes, curve, inside)
        dress_axes(axes, grid="y")
        axes.tick_params(labelsize=TEXT)
        corner = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(
            self.title, (0, 1), (-LEFT, TOP - 15), fontsize=TITLE, fontweight="bold",
            parse_math=False, **corner,
        )  # fmt: skip
        axes.annotate(self.y, (0, 1), (-LEFT, TOP - 33), color=LIGHT.third, fontsize=TEXT, **corner)
        axes.annotate(
            self.x, (0.5, 0), (0, -32), color=LIGHT.third, fontsize=TEXT, ha="center", **corner
        )
        if self._labels():
            axes.legend(
                loc="upper left", bbox_to_anchor=(0, -BELOW / HEIGHT), ncols=self._legend_columns(),
                frameon=False, fontsize=TEXT, borderaxespad=0, borderpad=0, handlelength=1.5,
                handletextpad=0.5, columnspacing=1.2, labelspacing=0.3,
            )  # fmt: skip

    def _drawable(self, curve: Series) -> list[Point]:
        return [
            (x, y)
            for x, y in curve.points
            if math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.log)
        ]

    def _scale(self, axes: Any, points: Sequence[Point]) -> Point:
        """Set the limits and ticks; return the lowest and the highest value that is drawn."""
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

        xs, ys = zip(*points, strict=True)
        left, right = min(xs), max(xs)
        axes.set_xlim(*((left - 0.5, right + 0.5) if left == right else (left, right)))
        bottom, top = self.limits or (min(ys), max(ys))
        if self.log:
            # The axis spans more than a decade, so that it has a tick.
            bottom = max(bottom / 1.3, sys.float_info.min)
            top = max(top * 1.3, bottom * 16)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(numticks=6))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(_power)
            low, high = bottom, top
        else:
            room = 0.0 if self.limits else 0.05 * ((top - bottom) or abs(top) or 1.0)
            bottom, top = bottom - room, top + room
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=STEPS))
            axes.yaxis.set_major_formatter(_number)
            outside = 0.02 * (top - bottom)
            low, high = bottom - outside, top + outside
        axes.set_ylim(bottom, top)
        axes.xaxis.set_major_locator(
            MaxNLocator(nbins=5, steps=STEPS, integer=self.integer_x, min_n_ticks=1)
        )
        axes.xaxis.set_major_formatter(_number)
        return low, high

    def _labels(self) -> list[str]:
        return [curve.label for curve in self.series if curve.label]

    def _legend_columns(self) -> int:
        """Return the number of columns that fit; a column is as wide as its longest label."""
        widths = [24 + LETTER * len(label) + 14 for label in self._labels()]
        for columns in range(len(widths), 1, -1):
            rows = -(-len(widths) // columns)
            longest = (max(widths[at : at + rows]) for at in range(0, len(widths), rows))
            if sum(longest) <= WIDTH - LEFT:
                return columns
        return 1


def side_by_side(charts: Sequence[tuple[str, float]], *, columns: int) -> str:
    """Return drawings of charts, given with their heights, as one SVG element."""
    gap = 28.0
    rows = [charts[first : first + columns] for first in range(0, len(charts), columns)]
    placed, top = [], 0.0
    for row in rows:
        for at, (drawn, _) in enumerate(row):
            placed.append(drawn.replace("<svg", f'<svg x="{at * (WIDTH + gap):g}" y="{top:g}"', 1))
        top += max(height for _, height in row) + gap
    width, height = columns * (WIDTH + gap) - gap, top - gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">{"".join(placed)}</svg>'
    )


def recolored(svg: str, theme: Theme) -> str:
    """Replace the light colors of a drawing by those of a theme."""
    for name, color in vars(LIGHT).items():
        svg = svg.replace(color, getattr(theme, name))
    return svg


def _inline(drawn: str) -> str:
    """Return an SVG for use inside a page: without prolog, style sheet, and ids."""
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", drawn, flags=re.S)
    # All curves lie inside the axes, and clipping would cut lines on their edge in half.
    drawn = re.sub(r"<clipPath.*?</clipPath>", "", drawn, flags=re.S)
    drawn = re.sub(r' clip-path="[^"]*"| xmlns:xlink="[^"]*"| id="[a-z0-9]+_\d+"', "", drawn)
    drawn = re.sub(r'="([\d.]+)pt"', r'="\1"', drawn).replace("xlink:href", "href")
    drawn = drawn.replace("'DejaVu Sans', 'Verdana', 'Arial', sans-serif", FONT)
    drawn = re.sub(r' transform="rotate\(-0 [^"]*"', "", re.sub(r"\n\s*", " ", drawn))
    drawn = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), drawn)
    return drawn.replace("<svg", '<svg stroke-linejoin="round"', 1)


def _draw_series(axes: Any, curve: Series, points: Sequence[Point]) -> None:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    look: dict[str, Any] = {
        "color": getattr(LIGHT, curve.color),
        "label": curve.label or None,
    }
    if curve.kind == "area":
        axes.fill_between(xs, ys, axes.get_ylim()[0], step="pre", alpha=0.18, linewidth=0, **look)
        axes.plot(xs, ys, drawstyle="steps-pre", linewidth=1.4, **look | {"label": None})
    elif curve.kind == "dots" or len(points) == 1:
        axes.plot(xs, ys, "o", markersize=6, alpha=0.7, markeredgewidth=0, **look)
    elif curve.kind == "thin":
        axes.plot(xs, ys, linewidth=0.7, alpha=0.3, zorder=1.5, **look)
    else:
        style = {"line": (2.2, "-"), "dashed": (1.6, "--")}[curve.kind]
        axes.plot(xs, ys, linewidth=style[0], linestyle=style[1], **look)


def _number(value: float, _: int | None = None) -> str:
    return f"{value:g}".replace("-", "−")


def _power(value: float, _: int | None = None) -> str:
    if value <= 0:  # A tick below the smallest positive float.
        return ""
    return "10" + str(round(math.log10(value))).translate(SUPERSCRIPTS)
