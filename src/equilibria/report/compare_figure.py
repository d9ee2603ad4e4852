"""The curves of several runs, as a PNG; matplotlib is imported where it is used."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from equilibria.report.compare import ComparedRun, score_name
from equilibria.report.figures import LIGHT, dress_axes

PAPER = "#ffffff"
COLORS = (
    *(LIGHT.first, LIGHT.second, "#2b8a3e", "#9c36b5"),
    *("#0c8599", "#c2255c", "#8a5a2b", LIGHT.third),
)
DASHES = ("-", "--", ":", "-.")
"""Of the first eight runs, the next eight, and so on."""
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.7
"""In inches."""
LETTER, LINE = 0.085, 0.22
"""The width of a letter and the height of a line of the legend, in inches."""
CPU = "cpu_seconds"
LEAST_FACTOR = 5.0
"""Losses further apart than this are drawn on a logarithmic axis."""


def comparison_png(runs: Sequence[ComparedRun], *, dots_per_inch: int = 120) -> bytes:
    """Loss, accuracy, validation score and iterations; over the epochs, and over processor time.

    A panel is there if a run has what it shows. Runs that did not record their processor time are
    left out of the second row.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    curves = _curves(runs)
    if not curves:
        raise ValueError("no run has finished an epoch: there is nothing to draw yet")
    timed = [bool(run.running_total(CPU)) for run in runs]
    rows = 2 if any(timed) else 1
    names = [
        run.name if is_timed or rows == 1 else f"{run.name} (CPU time not recorded)"
        for run, is_timed in zip(runs, timed, strict=True)
    ]
    width = PANEL_WIDTH * len(curves)
    columns = int(width / (LETTER * max(map(len, names)) + 0.7))
    columns = max(1, min(len(runs), columns))
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        legend_height = LINE * math.ceil(len(runs) / columns) + 0.1
        figure = Figure(
            figsize=(width, PANEL_HEIGHT * rows + legend_height),
            facecolor=PAPER,
            layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08),
        )
        panels = figure.subplots(rows, len(curves), squeeze=False, sharey="col")
        for column, (title, lines) in enumerate(curves.items()):
            for row, axis in enumerate(panels[:, column]):
                _draw(axis, title, lines, runs, over_time=row == 1)
        _name_runs(figure, names, columns)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()


Curve = list[tuple[int, float]]


def _curves(runs: Sequence[ComparedRun]) -> dict[str, list[Curve]]:
    """By title of the panel: a curve a run, empty where the run lacks it."""
    score = score_name(runs)
    curves = {
        "Training loss": [run.curve("loss") for run in runs],
        "Training accuracy": [run.curve("accuracy") for run in runs],
        f"Validation {score}": [run.scores for run in runs],
        "Iterations, mean": [run.curve("mean_iterations") for run in runs],
    }
    return {title: lines for title, lines in curves.items() if any(lines)}


def _draw(
    axis: Any, title: str, lines: list[Curve], runs: Sequence[ComparedRun], *, over_time: bool
) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    for place, (run, line) in enumerate(zip(runs, lines, strict=True)):
        minutes = [seconds / 60 for seconds in run.running_total(CPU)]
        if over_time and not minutes:
            continue
        along = [minutes[at] if over_time else run.epochs[at]["epoch"] for at, _ in line]
        axis.plot(along, [value for _, value in line], **_style(place))
        # The dot says where a run is, and shows one of a single epoch.
        if line:
            axis.plot(along[-1], line[-1][1], marker="o", markersize=4, color=_color(place))
    axis.set_xlabel("CPU minutes" if over_time else "epoch")
    if over_time:
        axis.set_xlim(left=0)
    else:
        axis.set_title(title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    values = [value for line in lines for _, value in line]
    if "accuracy" in title or "mIoU" in title or ("score" in title and max(values) <= 1):
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    elif "Iterations" in title:
        axis.set_ylim(0, 1.15 * max(values) or 1)
    elif max(values) > LEAST_FACTOR * min(values) > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    dress_axes(axis, LIGHT)


def _name_runs(figure: Any, names: Sequence[str], columns: int) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        handles=[Line2D([], [], label=name, **_style(at)) for at, name in enumerate(names)],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=10,
        labelcolor=LIGHT.ink,
    )


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _style(place: int) -> dict[str, Any]:
    dashes = DASHES[place // len(COLORS) % len(DASHES)]
    return {"color": _color(place), "linestyle": dashes, "linewidth": 2.0}
