"""Compare joint input optimization with solving at every step, by the time to equal true loss.

    python -m benchmarks.joint [--quick] [--cache FOLDER] [--sets 1 2] [--json FILE]
    python -m benchmarks.joint --figure FILE.png

Four problems on MNIST: an L2 attack (ε = 1) on an MDEQ and on an OptEq classifier, and the latents
of an MDEQ and of an OptEq decoder. Each is run on two sets of test images. The last table has all
ratios.

The baselines are 20 normalized projected gradient steps, or 40 of Adam, with the best step size of
a grid. Each step solves for z and μ: from zero to 1e-3 (cold), from the previous z and μ to 1e-2
(warm), or with 18 evaluations of Broyden's method, as in the paper.

Each joint engine gets growing budgets of iterations until it reaches the mean true loss of the
better of cold and warm. The time of that budget is compared; ratios in parentheses did not reach
the loss. Times are medians of the CPU time of one thread, measured in turns, and include the first
solve. True losses are computed at equilibria that are solved again from zero.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.joint_models import MODELS
from benchmarks.joint_problems import JointProblem, Method, Setting, peak_memory
from benchmarks.timing import interleaved_medians
from equilibria.inputs import InputResult
from equilibria.solvers import Broyden

BUDGETS = (4, 6, 8, 9, 10, 11, 12, 13, 14, 17, 20, 24, 28, 34, 40, 56, 80)
COARSE_BUDGETS = (10, 20, 40, 80)
"""Budgets of all engines except the first, most of which never reach the loss."""
ATTACK_STEPS = (1.0, 4.0, 8.0, 16.0, 32.0)
ADAM_RATES = (0.05, 0.15, 0.4, 1.0)
WARM_TOLERANCE = 1e-2
PAPER_EVALUATIONS = 18
"""Evaluations of the map per z, and pull-backs per μ (Table 9)."""
JOINT = ("auto", "anderson", "official")
"""The default of `optimize_input`, a safeguarded engine, and the engine of the paper."""
OFFICIAL_TASK = {"classifier": "mnist", "decoder": "latents"}
"""Task of the paper (appendix C.3) whose settings the engine "official" uses."""


@dataclass(eq=False)
class Row:
    """Result of one method on one problem."""

    problem: str
    label: str
    method: Method
    loss: float
    result: InputResult
    seconds: float = float("nan")
    memory: float = float("nan")
    image_set: int = 1


def baselines(problem: JointProblem, grid: Sequence[float], iterations: int) -> list[Row]:
    """Run the cold, the warm and the paper's baseline with the best step size.

    All three take the same steps of x up to their tolerances, so the warm baseline, which is the
    cheapest, chooses the step size.
    """
    engine = "gradient" if problem.attack else "adam"
    loose = {"inner_tolerance": WARM_TOLERANCE}
    trials = [
        _run(problem, f"{engine}, warm", Method(f"{engine}-warm", iterations, step, loose))
        for step in grid
    ]
    warm = min(trials, key=lambda row: row.loss)
    cold = Method(engine, iterations, warm.method.step_size)
    fixed = {"inner_tolerance": 1e-7, "inner_iterations": PAPER_EVALUATIONS}
    paper = replace(cold, options=fixed, solver=Broyden(rank=20))
    return [
        _run(problem, f"{engine}, cold", cold),
        warm,
        _run(problem, f"{engine}, cold, Broyden {PAPER_EVALUATIONS}", paper),
    ]


def _run(problem: JointProblem, label: str, method: Method) -> Row:
    result = problem.run(method)
    return Row(problem.name, label, method, problem.true_loss(result.x), result)


def first_to_reach(problem: JointProblem, engine: str, goal: float, budgets: Sequence[int]) -> Row:
    """Return the smallest budget that reaches the goal, or the one with the lowest loss."""
    kind = problem.name.split()[1]
    options = {"task": OFFICIAL_TASK[kind]} if engine == "official" else {}
    rows = []
    for budget in budgets:
        row = _run(problem, engine, Method(engine, budget, options=options))
        row.label = row.result.engine
        rows.append(row)
        if rows[-1].loss <= goal:
            return rows[-1]
    return min(rows, key=lambda row: row.loss)


def measure(
    problem: JointProblem,
    setting: Setting,
    engines: Sequence[str],
    repeats: int,
    *,
    quick: bool,
    with_memory: bool,
) -> list[Row]:
    """Time the baselines, and each engine at the budget that reaches their best loss."""
    grid = (1.0,) if quick else ATTACK_STEPS
    if not problem.attack:
        grid = (0.1,) if quick else ADAM_RATES
    iterations = 20 if problem.attack else 40
    if quick:
        iterations //= 4
    budgets = BUDGETS[:3] if quick else BUDGETS
    rows = baselines(problem, grid, iterations)
    goal = _goal(rows)
    for engine in engines:
        allowed = budgets if quick or engine == engines[0] else COARSE_BUDGETS
        rows.append(first_to_reach(problem, engine, goal, allowed))
    names = {f"{i}": row for i, row in enumerate(rows)}
    contestants = {name: lambda row=row: problem.run(row.method) for name, row in names.items()}
    medians = interleaved_medians(contestants, repeats, warm_up=0, budget=600)
    for name, row in names.items():
        row.seconds = medians[name]
        row.image_set = setting.image_set
        if with_memory:
            row.memory = peak_memory(problem.name, setting, row.method)
    return rows


def table(rows: Sequence[Row], images: int) -> Table:
    cold, warm, paper = rows[:3]
    title = f"{cold.problem}, image set {cold.image_set}: {images} images, one thread"
    drawn = Table(title=title, title_justify="left")
    columns = ("engine", "iterations", "step", "evaluations", "pull-backs", "ms per image")
    columns += ("÷ cold", "÷ warm", "÷ Broyden", "true loss", "residuals z, μ", "peak MiB")
    for column in columns:
        drawn.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        result, step = row.result, row.method.step_size
        reached = row.loss <= _goal(rows) or row in (cold, warm, paper)
        drawn.add_row(
            row.label,
            f"{row.method.iterations}",
            "" if step is None else f"{step:g}",
            f"{result.evaluations}",
            f"{result.vjps}",
            f"{1e3 * row.seconds / images:.2f}",
            *(_ratio(base.seconds / row.seconds, reached) for base in (cold, warm, paper)),
            f"{row.loss:.4f}",
            ", ".join(
                f"{float(residual.mean()):.0e}"
                for residual in (result.state_residual, result.adjoint_residual)
            ),
            "" if math.isnan(row.memory) else f"{row.memory:.0f}",
        )
    return drawn


def _goal(rows: Sequence[Row]) -> float:
    """The loss to reach: that of the better of cold and warm."""
    return min(row.loss for row in rows[:2])


def ratios(groups: Sequence[Sequence[Row]]) -> Table:
    """Table of the speedup of the first engine over cold and warm, per problem."""
    result = Table(title="times faster at equal true loss", title_justify="left")
    for column in ("problem", "image set", "engine", "than cold", "than warm"):
        result.add_column(column, justify="left" if column in ("problem", "engine") else "right")
    for rows in groups:
        cold, warm, _, ours, *_ = rows
        result.add_row(
            ours.problem,
            f"{ours.image_set}",
            ours.label,
            *(_ratio(row.seconds / ours.seconds, ours.loss <= _goal(rows)) for row in (cold, warm)),
        )
    return result


def _ratio(value: float, reached: bool) -> str:
    """Format a speedup; in parentheses if the loss was not reached."""
    return f"{value:.1f}×" if reached else f"({value:.1f}×)"


def as_data(row: Row) -> dict[str, object]:
    return {
        "problem": row.problem,
        "image_set": row.image_set,
        "engine": row.label,
        "iterations": row.method.iterations,
        "step_size": row.method.step_size,
        "evaluations": row.result.evaluations,
        "pull_backs": row.result.vjps,
        "seconds": row.seconds,
        "loss": row.loss,
        "state_residual": float(row.result.state_residual.mean()),
        "adjoint_residual": float(row.result.adjoint_residual.mean()),
        "peak_mebibytes": None if math.isnan(row.memory) else row.memory,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.joint",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, about a minute")
    parser.add_argument("--data", help="folder of MNIST (default: EQUILIBRIA_DATA)")
    parser.add_argument("--cache", type=Path, help="folder for trained models")
    parser.add_argument("--problems", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--engines", nargs="+", default=list(JOINT), help="the first one gets all budgets"
    )
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--sets", type=int, nargs="+", default=[1, 2], help="sets of test images")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all results to a file")
    parser.add_argument("--figure", type=Path, help="draw loss against time for a decoder instead")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.data, options.cache or Path(folder), options.images)
        if options.quick:
            steps = dict.fromkeys(setting.steps, 4)
            setting = replace(setting, images=8, training_images=200, steps=steps)
        if options.figure is not None:
            from benchmarks.joint_figure import draw

            draw(JointProblem("MDEQ decoder", setting), options.figure)
            return 0
        groups: list[list[Row]] = []
        for name in options.problems:
            for place, image_set in enumerate(options.sets):
                subset = replace(setting, image_set=image_set)
                rows = measure(
                    JointProblem(name, subset),
                    subset,
                    options.engines,
                    options.repeats,
                    quick=options.quick,
                    with_memory=place == 0,
                )
                console.print(table(rows, setting.images))
                groups.append(rows)
                if options.json is not None:
                    data = [as_data(row) for group in groups for row in group]
                    options.json.write_text(json.dumps(data, indent=1) + "\n")
        console.print(ratios(groups))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
