"""Curves of several training runs as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from equilibria.analysis.compare import CPU, ComparedRun, Curve, score_name
from equilibria.report import style

PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.7
"""Size of a panel, in inches."""
LINE = 0.22
"""Height of a line of the legend, in inches."""
WIDTH, MARK = 2.0, 5.0
"""Width of a line and size of the mark at its end, in points."""


@style.drawing()
def comparison_png(runs: Sequence[ComparedRun]) -> bytes:
    """Draw loss, accuracy, validation score, and iterations over epochs and over processor time.

    Panels for which no run has data are omitted, and so are runs without recorded processor time
    in the second row.

    Args:
        runs: The runs, in the order of the legend.

    Returns:
        A PNG.

    Raises:
        ValueError: If no run has finished an epoch.

    Examples:
        >>> from pathlib import Path
        >>> recipe = eq.training.load_recipe("digits-opteq")
        >>> epochs = ({"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0})
        >>> from equilibria.analysis.compare import ComparedRun
        >>> from equilibria.report.compare import comparison_png
        >>> run = ComparedRun("a", Path("runs/a"), recipe, None, 100, True, epochs, None)
        >>> comparison_png([run])[1:4]
        b'PNG'
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    all_curves = {
        "Training loss": [run.curve("loss") for run in runs],
        "Training accuracy": [run.curve("accuracy") for run in runs],
        f"Validation {score_name(runs)}": [run.scores for run in runs],
        "Iterations, mean": [run.curve("mean_iterations") for run in runs],
    }
    curves = {title: lines for title, lines in all_curves.items() if any(lines)}
    if not curves:
        raise ValueError("no run has finished an epoch, so there is nothing to draw")
    timed = [bool(run.running_total(CPU)) for run in runs]
    rows = 2 if any(timed) else 1
    width = PANEL_WIDTH * len(curves)
    names = [
        style.shortened(run.name, int(0.6 * width / style.LETTER))
        + ("" if is_timed or rows == 1 else " (CPU time not recorded)")
        for run, is_timed in zip(runs, timed, strict=True)
    ]
    columns = style.legend_columns(names, width)
    legend_height = LINE * math.ceil(len(runs) / columns) + 0.1
    figure = Figure(
        figsize=(width, PANEL_HEIGHT * rows + legend_height),
        facecolor=style.PAPER,
        layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08),
    )
    panels = figure.subplots(rows, len(curves), squeeze=False, sharey="col")
    for column, (title, lines) in enumerate(curves.items()):
        for row, axis in enumerate(panels[:, column]):
            _draw(axis, title, lines, runs, over_time=row == 1)
    marks = [
        Line2D([], [], label=name, linewidth=WIDTH, markersize=MARK, **style.series(at))
        for at, name in enumerate(names)
    ]
    style.legend_below(figure, marks, columns)
    return style.figure_png(figure)


def _draw(
    axis: Any, title: str, lines: list[Curve], runs: Sequence[ComparedRun], *, over_time: bool
) -> None:
    from matplotlib.ticker import PercentFormatter

    longest = max((run.total(CPU) or 0.0 for run in runs), default=0.0)
    unit, unit_name = style.time_unit(longest)
    for index, (run, line) in enumerate(zip(runs, lines, strict=True)):
        times = [seconds / unit for seconds in run.running_total(CPU)]
        if over_time and not times:
            continue
        along = [times[at] if over_time else run.epochs[at]["epoch"] for at, _ in line]
        look = style.series(index)
        mark = look.pop("marker")
        axis.plot(along, [value for _, value in line], linewidth=WIDTH, **look)
        # The mark shows the end of a run, and runs of a single epoch, which have no line.
        if line:
            axis.plot(along[-1], line[-1][1], marker=mark, markersize=MARK, color=look["color"])
    if over_time:
        axis.set_xlabel(f"processor time ({unit_name})")
        axis.set_xlim(left=0)
    else:
        axis.set_title(title)
        style.count_along(axis, "epoch")
    values = [value for line in lines for _, value in line]
    if "accuracy" in title or "mIoU" in title or ("score" in title and max(values) <= 1):
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    elif "Iterations" in title:
        axis.set_ylim(0, 1.15 * max(values) or 1)
    elif max(values) > style.LEAST_FACTOR * min(values) > 0:
        style.plain_log_axis(axis)
    style.dress_axes(axis)
