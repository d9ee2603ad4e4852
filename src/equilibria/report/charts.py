"""Charts of a page as SVG: small, drawn in milliseconds, in the colors of the page they stand on.

Each is as wide as a phone; pages put them side by side where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from equilibria.report.style import LIGHT, Theme

WIDTH, HEIGHT = 360.0, 210.0
"""Of a chart and of the part with its curves, in pixels of a page."""
LEFT, RIGHT, TOP, BELOW = 46.0, 12.0, 44.0, 36.0
LINE = 18.0
"""The height of a line of the legend."""
LETTER = 6.4
"""The width of a letter of the legend, about."""
TITLE, TEXT = 14, 12
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', Verdana, Arial, sans-serif"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Kind = Literal["line", "dashed", "thin", "dots", "area"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points, which are left out where they are not finite, or not positive on a log axis."""

    points: Sequence[Point]
    label: str = ""
    """In the legend; empty: not there."""
    color: str = "first"
    """By its name in a `Theme`."""
    kind: Kind = "line"
    """An area is a staircase: a height holds from the point before to its own."""


@dataclass(frozen=True)
class Chart:
    """Series over one pair of axes."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    description: str
    """For those who do not see it."""
    log: bool = False
    """Whether the upright axis is logarithmic."""
    whole: bool = False
    """Whether the other one counts."""
    limits: tuple[float, float] | None = None
    """Of the upright axis, if not those of the points."""

    def svg(self, theme: Theme = LIGHT) -> str:
        """A picture of its own."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {self.height:g}" '
            f'width="{WIDTH:g}" height="{self.height:g}" role="img" '
            f'aria-label="{escape(self.description)}" font-family="{FONT}" font-size="{TEXT}px">'
            f"<title>{escape(self.description)}</title>{self.body(theme)}</svg>"
        )

    @property
    def height(self) -> float:
        return TOP + HEIGHT + BELOW + LINE * len(self._legend()) + 4

    def body(self, theme: Theme) -> str:
        """What is in the picture, for others to place it."""
        axes = _Axes.of(self)
        ink, faint = theme.ink, theme.faint
        drawn = [
            _text(0, 15, self.title, ink, size=TITLE, weight="600"),
            _text(0, 33, self.y, theme.third),
            _text(LEFT + axes.width / 2, TOP + HEIGHT + 32, self.x, theme.third, "middle"),
        ]
        for at, label in axes.y_ticks:
            height = axes.place_y(at)
            drawn.append(_path([(LEFT, height), (WIDTH - RIGHT, height)], faint, 0.8))
            drawn.append(_text(LEFT - 6, height + 4, label, ink, "end"))
        for at, label in axes.x_ticks:
            inside = min(axes.place_x(at), WIDTH - LETTER * len(label) / 2)
            drawn.append(_text(inside, TOP + HEIGHT + 16, label, ink, "middle"))
        order = {"area": 0, "thin": 1}
        for one in sorted(self.series, key=lambda one: order.get(one.kind, 2)):
            drawn.append(self._curve(one, axes, getattr(theme, one.color)))
        for row, items in enumerate(self._legend()):
            height = TOP + HEIGHT + BELOW + LINE * (row + 0.75)
            at = LEFT
            for one in items:
                color = getattr(theme, one.color)
                ends = [(at, height - 4), (at + 18, height - 4)]
                drawn.append(_mark(one.kind, ends, color))
                drawn.append(_text(at + 24, height, one.label, ink))
                at += _legend_width(one)
        return "".join(drawn)

    def _curve(self, one: Series, axes: _Axes, color: str) -> str:
        placed = [(axes.place_x(x), axes.place_y(y)) for x, y in one.points if axes.shows(x, y)]
        if not placed:
            return ""
        if one.kind == "area":
            placed, floor = _staircase(placed), TOP + HEIGHT
            corners = [(placed[0][0], floor), *placed, (placed[-1][0], floor)]
            line = _path(placed, color, 1.4)
            return f'<path d="{_steps(corners)}Z" style="fill:{color};opacity:.18"/>{line}'
        if one.kind == "dots" or len(placed) == 1:
            return "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{color};opacity:.7"/>'
                for x, y in placed
            )
        if one.kind == "thin":
            return _path(placed, color, 0.7, opacity=0.3)
        return _path(placed, color, 2.2 if one.kind == "line" else 1.6, one.kind == "dashed")

    def _legend(self) -> list[list[Series]]:
        """Rows of it, as many in each as there is room for."""
        rows: list[list[Series]] = []
        used = math.inf
        for one in (one for one in self.series if one.label):
            width = _legend_width(one)
            if used + width > WIDTH - LEFT:
                rows.append([])
                used = 0.0
            rows[-1].append(one)
            used += width
        return rows


@dataclass(frozen=True)
class _Axes:
    low: Point
    high: Point
    log: bool
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]

    width = WIDTH - LEFT - RIGHT

    @classmethod
    def of(cls, chart: Chart) -> _Axes:
        points = [
            (x, y)
            for one in chart.series
            for x, y in one.points
            if math.isfinite(x) and math.isfinite(y) and (y > 0 or not chart.log)
        ] or [(0.0, 1.0)]
        xs, ys = zip(*points, strict=True)
        left, right = min(xs), max(xs)
        if left == right:
            left, right = left - 0.5, right + 0.5
        bottom, top = chart.limits or (min(ys), max(ys))
        if chart.log:
            # Half a decade at least, so that there is a tick.
            bottom, top = bottom / 1.3, max(top * 1.3, bottom * 12)
            y_ticks = _decades(bottom, top)
        else:
            room = 0.0 if chart.limits else 0.05 * ((top - bottom) or abs(top) or 1.0)
            bottom, top = bottom - room, top + room
            y_ticks = _round_ticks(bottom, top)
        x_ticks = _round_ticks(left, right, whole=chart.whole)
        return cls((left, bottom), (right, top), chart.log, x_ticks, y_ticks)

    def shows(self, x: float, y: float) -> bool:
        return math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.log)

    def place_x(self, x: float) -> float:
        return LEFT + self.width * (x - self.low[0]) / (self.high[0] - self.low[0])

    def place_y(self, y: float) -> float:
        low, high = self.low[1], self.high[1]
        if self.log:
            y, low, high = math.log10(y), math.log10(low), math.log10(high)
        share = (y - low) / (high - low)
        return TOP + HEIGHT * (1 - min(1.02, max(-0.02, share)))


def side_by_side(charts: Sequence[Chart], theme: Theme, *, columns: int) -> bytes:
    """Several charts as one file."""
    gap = 28.0
    rows = [charts[first : first + columns] for first in range(0, len(charts), columns)]
    placed, top = [], 0.0
    for row in rows:
        for column, chart in enumerate(row):
            left = column * (WIDTH + gap)
            placed.append(f'<g transform="translate({left:g} {top:g})">{chart.body(theme)}</g>')
        top += max(chart.height for chart in row) + gap
    width, height = columns * (WIDTH + gap) - gap, top - gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{FONT}" font-size="{TEXT}px">'
        f"{''.join(placed)}</svg>"
    ).encode()


def _legend_width(one: Series) -> float:
    return 24 + LETTER * len(one.label) + 14


def _round_ticks(low: float, high: float, whole: bool = False) -> list[tuple[float, str]]:
    """Some four round numbers."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / 4))
    steps = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    if whole:
        steps = [step for step in steps if step >= 1 and step == round(step)] or [1.0]
    step = next((s for s in steps if span / s <= 5), steps[-1])
    first = math.ceil(low / step - 1e-9)
    ticks = [round(step * place, 12) for place in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(tick, f"{tick:g}".replace("-", "−")) for tick in ticks]


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, math.ceil((last - first) / 4))
    powers = range(first, last + 1, every)
    return [(10.0**power, "10" + str(power).translate(SUPERSCRIPTS)) for power in powers]


def _staircase(points: Sequence[Point]) -> list[Point]:
    """Every height holds from the point before to its own: nothing between two is made up."""
    corners = list(points[:1])
    for (before, _), point in pairwise(points):
        corners += [(before, point[1]), point]
    return corners


def _steps(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _path(
    points: Sequence[Point], color: str, width: float, dashed: bool = False, opacity: float = 1.0
) -> str:
    style = f"fill:none;stroke:{color};stroke-width:{width:g};stroke-linejoin:round"
    style += ";stroke-dasharray:5 4" if dashed else ""
    style += f";opacity:{opacity:g}" if opacity < 1 else ""
    return f'<path d="{_steps(points)}" style="{style}"/>'


def _mark(kind: Kind, ends: Sequence[Point], color: str) -> str:
    if kind == "dots":
        x, y = ends[0][0] + 9, ends[0][1]
        return f'<circle cx="{x:g}" cy="{y:g}" r="3.5" style="fill:{color}"/>'
    if kind == "area":
        x, y = ends[0]
        return (
            f'<rect x="{x:g}" y="{y - 5:g}" width="18" height="10" '
            f'style="fill:{color};opacity:.35"/>'
        )
    return _path(ends, color, 2.2 if kind == "line" else 1.6, kind == "dashed")


def _text(
    x: float,
    y: float,
    text: str,
    color: str,
    anchor: str = "start",
    *,
    size: int = TEXT,
    weight: str = "400",
) -> str:
    style = f"fill:{color};font-size:{size}px;font-weight:{weight}"
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} style="{style}">{escape(text)}</text>'
