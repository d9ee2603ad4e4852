"""Loss against time for every engine, as in Figures 3 and 4 of the JIIO paper."""

from __future__ import annotations

from pathlib import Path

from benchmarks.joint_problems import JointProblem, Method
from benchmarks.timing import cpu_seconds

METHODS: dict[str, tuple[str, float | None, tuple[int, ...]]] = {
    "Adam, cold": ("adam", 0.1, (5, 10, 20, 40)),
    "Adam, warm": ("adam-warm", 0.1, (5, 10, 20, 40)),
    "official (type I, memory 40)": ("official", None, (10, 20, 40, 80)),
    "type I, safeguarded": ("anderson", None, (5, 10, 20, 40)),
    "type II": ("anderson2", None, (5, 10, 20, 40)),
    "Broyden": ("broyden", None, (5, 10, 20, 40)),
    "damped": ("damped", None, (5, 10, 20, 40)),
    "secant (the default)": ("secant", None, (3, 6, 10, 14, 20, 40)),
}


def draw(problem: JointProblem, file: Path) -> None:
    """The true loss and the CPU time of growing budgets, a run each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    count = len(problem.x0)
    for label, (engine, step, budgets) in METHODS.items():
        times, losses = [], []
        for budget in budgets:
            method = Method(engine, budget, step)
            found = []
            seconds = cpu_seconds(lambda m=method, f=found: f.append(problem.run(m)))
            times.append(1e3 * seconds / count)
            losses.append(problem.true_loss(found[0].x))
        bold = engine == "secant"
        axes.plot(
            times, losses, marker="o", markersize=3, label=label, linewidth=2.5 if bold else 1
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="CPU time an image, ms",
        ylabel="mean true loss",
        title=f"{problem.name}: reconstruction of {count} images of MNIST",
    )
    axes.legend(fontsize="small", loc="lower left")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150)
