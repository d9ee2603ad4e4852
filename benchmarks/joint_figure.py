"""Loss against time for every engine, as in Figures 3 and 4 of the JIIO paper."""

from __future__ import annotations

from pathlib import Path

from benchmarks.joint_problems import JointProblem, Method
from benchmarks.timing import cpu_seconds
from equilibria.report.style import (
    drawing,
    dress_axes,
    figure_png,
    legend_below,
    legend_columns,
    plain_log_axis,
    series,
)

METHODS: dict[str, tuple[str, float | None, tuple[int, ...]]] = {
    "Adam, cold": ("adam", 0.1, (5, 10, 20, 40)),
    "Adam, warm": ("adam-warm", 0.1, (5, 10, 20, 40)),
    "the paper (type I, memory 40)": ("official", None, (10, 20, 40, 80)),
    "type I, safeguarded": ("anderson", None, (5, 10, 20, 40)),
    "secant (the default)": ("secant", None, (3, 6, 10, 14, 20, 40)),
}


@drawing()
def draw(problem: JointProblem, file: Path) -> None:
    """Draw true loss against CPU time, with one run per budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    axes = figure.subplots()
    count = len(problem.x0)
    for place, (label, (engine, step, budgets)) in enumerate(METHODS.items()):
        times, losses = [], []
        for budget in budgets:
            method = Method(engine, budget, step)
            results = []
            seconds = cpu_seconds(lambda m=method, r=results: r.append(problem.run(m)))
            times.append(1e3 * seconds / count)
            losses.append(problem.true_loss(results[0].x))
        bold = engine == "secant"
        look = {**series(place), "markersize": 5, "linewidth": 2.5 if bold else 1.4}
        axes.plot(times, losses, label=label, **look)
    axes.set(
        xlabel="CPU time per image, ms",
        ylabel="mean true loss",
        title=f"{problem.name}: reconstruction of {count} images of MNIST",
    )
    plain_log_axis(axes, "x")
    plain_log_axis(axes)
    dress_axes(axes)
    legend_below(figure, axes.get_legend_handles_labels()[0], legend_columns(list(METHODS), 7.2))
    file.write_bytes(figure_png(figure))
