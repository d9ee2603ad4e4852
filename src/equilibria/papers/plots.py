"""Figure of a table: this library's results beside those of the paper, one line per panel.

The panels are listed under `picture` in the file of the table. The figure is drawn from the record
of a table, so it can be redrawn without a run.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from equilibria.papers.measures import Measure, collect, deviation, measure_of
from equilibria.papers.series_plots import SeriesLine
from equilibria.papers.table import Panel, PaperTable
from equilibria.report.style import (
    LEAST_FACTOR,
    LIGHT,
    SMALL,
    drawing,
    dress_axes,
    figure_png,
    legend_columns,
    plain_axis,
    plain_log_axis,
    series,
    wrapped,
)

WIDTH = 7.4
LINE_HEIGHT = 0.2
"""Height of a line of text, in inches."""
MAX_LABEL_LETTERS = 30
"""Largest number of letters in a line of a row's label."""
MAGNITUDES = {"k": 1e3, "K": 1e3, "M": 1e6}
LEVEL = {"linestyle": "--", "marker": ""}
"""Line style of a row without a value on the axis: a horizontal level among curves."""
PRINTED = re.compile(
    r"(?P<value>\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(?:±\s*(?P<spread>\d+(?:[.,]\d+)?))?\s*"
    r"(?P<magnitude>[kKM](?![A-Za-z]))?\s*(?P<unit>\S*)"
)


@dataclass(frozen=True)
class Printed:
    """A number as printed in a paper, with its spread and unit.

    Attributes:
        value: The number.
        spread: Its standard deviation, if printed.
        unit: Its unit, if printed.
        is_bound: Whether the paper prints "> value".
    """

    value: float
    spread: float | None = None
    unit: str = ""
    is_bound: bool = False


def printed(text: str) -> Printed | None:
    """Parse the first number in a text: 92.9, 0.2 and % in "92.9 ± 0.2%"."""
    match = PRINTED.search(text)
    if match is None:
        return None
    scale = MAGNITUDES.get(match["magnitude"] or "", 1.0)
    spread = match["spread"]
    return Printed(
        scale * float(match["value"]),
        None if spread is None else scale * float(spread.replace(",", ".")),
        match["unit"],
        text.lstrip().startswith(">"),
    )


@dataclass(frozen=True)
class Points:
    """Values of one column in one row of a table, of our runs or of the paper."""

    values: Sequence[float]
    spread: float | None
    is_bound: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True)
class RecordedRow:
    """A row of a table as it was recorded; the table may have changed since.

    Attributes:
        label: Label of the row.
        paper: Printed numbers of the paper, by title of the column.
        runs: Results of the runs.
        measures: Names of measures, by title of the column.
    """

    label: str
    paper: Mapping[str, str]
    runs: Sequence[Mapping[str, Any]]
    measures: Mapping[str, str | None]

    @classmethod
    def of(cls, table: PaperTable, data: Mapping[str, Any]) -> RecordedRow:
        """Read a row; records without measures use those of the row with the same label."""
        row = next((row for row in table.rows if row.label == data["label"]), None)
        current = {c.title: c.measure if row is None else row.measure(c) for c in table.columns}
        return cls(data["label"], data["paper"], data["runs"], data.get("measures", current))

    def measure(self, shown: str, default: str | None) -> str | None:
        """Return the measure of a column title; the name of a measure stands for itself."""
        return self.measures.get(shown, shown) or default


@dataclass(frozen=True)
class Side:
    """One side of the figure, ours or the paper's: its points and the titles of its axes."""

    rows: Sequence[RecordedRow]
    is_ours: bool

    def points(self, row: RecordedRow, shown: str, default: str | None = None) -> Points | None:
        """Return the values of a column in a row; `default` replaces a missing measure."""
        if not self.is_ours:
            number = printed(row.paper.get(shown, ""))
            if number is None:
                return None
            return Points([number.value], number.spread, number.is_bound)
        name = row.measure(shown, default)
        values = [] if name is None else collect([dict(run) for run in row.runs], name)
        if name is None or not values:
            return None
        scaled = [measure_of(name).scale * value for value in values]
        return Points(scaled, deviation(scaled))

    def measure(self, shown: str, default: str | None) -> Measure:
        """Return the measure of the first row that has one."""
        names = (row.measure(shown, default) for row in self.rows)
        return measure_of(next(name for name in names if name is not None))

    def title(self, shown: str, default: str | None) -> str:
        """Return the title of an axis, with its unit."""
        if self.is_ours:
            return self.measure(shown, default).title
        numbers = (printed(row.paper.get(shown, "")) for row in self.rows)
        unit = next((number.unit for number in numbers if number is not None), "")
        return f"paper: {shown} ({unit})" if unit and unit not in shown else f"paper: {shown}"


def table_png(table: PaperTable, record: Mapping[str, Any]) -> bytes:
    """Draw the figure of a table as a PNG."""
    return figure_png(table_figure(table, record), is_drawing=True)


@drawing()
def table_figure(table: PaperTable, record: Mapping[str, Any]) -> Any:
    """Draw the figure of a table: our results left and those of the paper right.

    Each seed is a dot; a bar is the mean ± standard deviation.
    """
    from matplotlib.figure import Figure

    rows = [RecordedRow.of(table, data) for data in record["rows"]]
    sides = [Side(rows, is_ours=True), Side(rows, is_ours=False)]
    lines = [_line(panel, sides, table.turned) for panel in table.picture]
    heights = [line.height for line in lines]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)[:, 0]
    quick = record["setting"] == "quick"
    titles = ["this library (quick setting)" if quick else "this library", "the paper, as printed"]
    for place, (part, line) in enumerate(zip(parts, lines, strict=True)):
        axes = line.draw(part)
        for axis, title in zip(axes, titles if place == 0 else (), strict=False):
            axis.set_title(title)
    return figure


def _line(panel: Panel, sides: Sequence[Side], turned: bool) -> _Line | SeriesLine:
    if not panel.form:
        return _TurnedLine(panel, sides) if turned else _Line(panel, sides)
    rows = [row for row in sides[0].rows if row.label.startswith(panel.rows) and row.runs]
    return SeriesLine(panel, [(row.label, row.runs) for row in rows], WIDTH)


class _Line:
    """A panel with one plot for each side that has points for it."""

    def __init__(self, panel: Panel, sides: Sequence[Side]) -> None:
        self.panel = panel
        self.rows = [row for row in sides[0].rows if row.label.startswith(panel.rows)]
        self.sides = [
            side for side in sides if any(map(partial(self._has_points, side), self.rows))
        ]
        self.names = self._names()
        self.levels = {row.label for row in self.rows if not self._place(row)[1]}
        columns = legend_columns(self.names, WIDTH) if self.names else 1
        self.legend_columns = columns
        legend = LINE_HEIGHT * -(-len(self.names) // columns) + 0.1 if self.names else 0.0
        labels = [wrapped(row.label, MAX_LABEL_LETTERS) for row in self.rows]
        least = 1.4 if len(panel.show) == 1 else 0.8 + 0.6 * len(panel.show)
        # All rows have the distance that the two neighbors with the longest labels need.
        label_lines = [label.count("\n") + 1 for label in labels]
        distance = max(((upper + lower) / 2 for upper, lower in pairwise(label_lines)), default=1.0)
        lines = len(labels) * max(least, 1.1 * distance)
        is_list = not (panel.over or panel.along)
        self.labels = labels
        self.height = (0.62 + LINE_HEIGHT * lines if is_list else 2.9) + legend

    def draw(self, part: Any) -> Sequence[Any]:
        """Plot the panel's values into a subfigure, and return the axes.

        There is one plot for our results and one for the paper's, if there are points for it.
        """
        from matplotlib.lines import Line2D

        panel = self.panel
        is_list = not (panel.over or panel.along)
        axes = part.subplots(1, max(1, len(self.sides)), sharey=is_list, squeeze=False)[0]
        draw = self._draw_tradeoff if panel.over else self._draw_curves
        for axis, side in zip(axes, self.sides, strict=False):
            (self._draw_list if is_list else draw)(axis, side)
            dress_axes(axis)
        if self.names:
            marks = [
                Line2D([], [], label=name, markersize=6, **self._style(at))
                for at, name in enumerate(self.names)
            ]
            part.legend(
                handles=marks,
                loc="outside lower center",
                ncols=self.legend_columns,
                frameon=False,
                fontsize=SMALL,
            )
        return list(axes)

    def _has_points(self, side: Side, row: RecordedRow) -> bool:
        """Whether a side has a number for a row; a trade-off needs two."""
        panel = self.panel
        shown = any(side.points(row, name, panel.measure) for name in panel.show)
        return shown and (not panel.over or side.points(row, panel.over, panel.measure) is not None)

    def _names(self) -> list[str]:
        """Return the names in the legend."""
        if self.panel.along:
            return list(dict.fromkeys(self._place(row)[0] for row in self.rows))
        if self.panel.over:
            return [
                row.label for row in self.rows if any(self._has_points(s, row) for s in self.sides)
            ]
        return list(self.panel.show) if len(self.panel.show) > 1 else []

    def _style(self, place: int) -> dict[str, Any]:
        style = series(place)
        if not self.panel.along:
            return {**style, "linestyle": "none"}
        return {**style, **LEVEL} if self.names[place] in self.levels else style

    def _place(self, row: RecordedRow) -> tuple[str, str]:
        """Split "no Reg, α = 0.4" into "no Reg" and "0.4", or "" if the label has no value."""
        name, _, value = row.label.partition(f", {self.panel.along} = ")
        return name, value

    def _draw_list(self, axis: Any, side: Side) -> None:
        """Draw the rows below each other."""
        drawn: list[float] = []
        count = len(self.panel.show)
        for at, shown in enumerate(self.panel.show):
            shift = 0.0 if count == 1 else 0.44 * (at / (count - 1) - 0.5)
            for place, row in enumerate(self.rows):
                points = side.points(row, shown, self.panel.measure)
                if points is None:
                    continue
                drawn.extend(points.values)
                style = {"color": series(at if count > 1 else int(not side.is_ours))["color"]}
                mark = series(at)["marker"] if count > 1 else "o" if side.is_ours else "D"
                mark = ">" if points.is_bound else mark
                _dots(axis, points, place + shift, style | {"marker": mark})
        axis.set_yticks(range(len(self.rows)), self.labels)
        axis.set_ylim(len(self.rows) - 0.4, -0.6)
        shown = self.panel.show[0]
        title = side.title(shown, self.panel.measure)
        if count > 1:  # the legend names the measures
            match = re.search(r"\((.+)\)$", title)
            unit = self.panel.unit or (match.group(1) if match else "")
            title = unit if side.is_ours else f"paper: {unit}"
        axis.set_xlabel(title)
        _ticks(axis, "x", drawn, side.measure(shown, self.panel.measure))

    def _draw_tradeoff(self, axis: Any, side: Side) -> None:
        """Draw one measure over another, one marker per row."""
        (shown,), over = self.panel.show, self.panel.over
        across: list[float] = []
        along: list[float] = []
        drawn = [row for row in self.rows if row.label in self.names]
        for place, row in enumerate(drawn):
            x, y = (side.points(row, name, self.panel.measure) for name in (over, shown))
            if x is None or y is None:
                continue
            across.extend(x.values)
            along.extend(y.values)
            style = series(place)
            axis.errorbar(
                x.mean, y.mean, xerr=x.spread, yerr=y.spread, color=style["color"],
                marker=style["marker"], markersize=7, linewidth=1.2,
            )  # fmt: skip
        axis.set(xlabel=side.title(over, self.panel.measure))
        axis.set(ylabel=side.title(shown, self.panel.measure))
        axis.margins(0.1)
        _ticks(axis, "x", across, side.measure(over, self.panel.measure))
        _ticks(axis, "y", along, side.measure(shown, self.panel.measure))

    def _draw_curves(self, axis: Any, side: Side) -> None:
        """Draw a measure over the values at the end of labels, one curve per name."""
        (shown,) = self.panel.show
        steps = sorted({value for row in self.rows if (value := self._place(row)[1])}, key=float)
        levels = {name for name, value in map(self._place, self.rows) if not value}
        curves = [name for name in self.names if name not in levels]
        drawn: list[float] = []
        for place, name in enumerate(self.names):
            style = series(place)
            points = {
                value: known
                for row in self.rows
                for row_name, value in [self._place(row)]
                if row_name == name and (known := side.points(row, shown)) is not None
            }
            drawn += [value for known in points.values() for value in known.values]
            if "" in points:
                level = {"color": style["color"], **LEVEL}
                axis.axhline(points[""].mean, linewidth=1.4, **level)
                continue
            # Curves are shifted a little, so that their bars do not overlap.
            count = len(curves)
            shift = 0.3 * (curves.index(name) / (count - 1) - 0.5) if count > 1 else 0.0
            axis.errorbar(
                [steps.index(value) + shift for value in points],
                [known.mean for known in points.values()],
                yerr=[known.spread or 0.0 for known in points.values()],
                linewidth=1.4, elinewidth=0.9, markersize=5, **style,
            )  # fmt: skip
        axis.set_xticks(range(len(steps)), steps)
        axis.set(xlabel=self.panel.along, ylabel=side.title(shown, None))
        _ticks(axis, "y", drawn, side.measure(shown, None))


class _TurnedLine(_Line):
    """A panel that lists the measures below each other, with one marker per row."""

    def __init__(self, panel: Panel, sides: Sequence[Side]) -> None:
        super().__init__(panel, sides)
        lines = max(1.4, 0.8 + 0.6 * len(self.rows)) * len(panel.show)
        self.height = 0.62 + LINE_HEIGHT * (lines + 1) + 0.1

    def _names(self) -> list[str]:
        return [row.label for row in self.rows]

    def _draw_list(self, axis: Any, side: Side) -> None:
        panel, count = self.panel, len(self.rows)
        for at, row in enumerate(self.rows):
            style = {key: series(at)[key] for key in ("color", "marker")}
            for place, shown in enumerate(panel.show):
                points = side.points(row, shown, panel.measure)
                if points is not None:
                    _dots(axis, points, place + 0.44 * (at / max(1, count - 1) - 0.5), style)
        axis.set_yticks(range(len(panel.show)), panel.show)
        axis.set_ylim(len(panel.show) - 0.4, -0.6)
        axis.set_xlabel(panel.unit if side.is_ours else f"paper: {panel.unit}")
        plain_axis(axis, "x")


def _dots(axis: Any, points: Points, place: float, style: dict[str, Any]) -> None:
    """Draw one dot per run with their mean and deviation, or the numbers of a paper."""
    several = len(points.values) > 1
    axis.plot(
        points.values, [place] * len(points.values), linestyle="none",
        alpha=0.45 if several else 1.0, markersize=5.5, markeredgewidth=0, **style,
    )  # fmt: skip
    if points.spread:
        axis.errorbar(
            points.mean, place, xerr=points.spread, fmt="|" if several else "none",
            color=LIGHT.ink if several else style["color"], markersize=10, linewidth=1.2,
        )  # fmt: skip


def _ticks(axis: Any, along: Literal["x", "y"], values: Sequence[float], measure: Measure) -> None:
    if measure.log and values and max(values) > LEAST_FACTOR * min(values) > 0:
        plain_log_axis(axis, along)
        return
    plain_axis(axis, along)
    if measure.log:  # amounts are easiest to compare from zero
        getattr(axis, f"set_{along}lim")(
            0, max(getattr(axis, f"get_{along}lim")()[1], 1.06 * max(values))
        )
