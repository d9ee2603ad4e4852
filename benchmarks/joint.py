"""Input optimization: the time to equal true loss, against solving at every step.

    python -m benchmarks.joint [--quick] [--cache FOLDER] [--sets 1 2] [--json FILE]
    python -m benchmarks.joint --figure FILE.png

Four problems on MNIST: an L2 attack (ε = 1) on an MDEQ and an OptEq classifier, the latents of an
MDEQ and an OptEq decoder, each on two sets of test images; a last table has all ratios. The
baselines are 20 normalized projected gradient steps, or 40 of Adam, with the best step size of a
grid; each step solves for z and μ, from nothing to 1e-3 (cold), from the last ones to 1e-2 (warm),
or with the paper's 18 evaluations of Broyden's method. Every joint engine gets growing budgets of
iterations until it reaches the mean true loss of the better of cold and warm; the time of that
budget is compared, and stands in brackets where none reaches it. Times are medians of CPU time of
one thread, in turns, and hold all that x takes, the first solve included; true losses are of
equilibria solved anew.
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
"""For every engine but the first: most of them never get there."""
ATTACK_STEPS = (1.0, 4.0, 8.0, 16.0, 32.0)
ADAM_RATES = (0.05, 0.15, 0.4, 1.0)
WARM_TOLERANCE = 1e-2
PAPER_EVALUATIONS = 18
"""Of the map for every z, and pull-backs for every μ (Table 9)."""
JOINT = ("auto", "anderson", "official")
"""What `optimize_input` chooses ("momentum" or "secant"), one with safeguards, the paper's."""
OFFICIAL_TASK = {"classifier": "mnist", "decoder": "latents"}
"""Whose settings of the paper's appendix hold (C.3)."""


@dataclass(eq=False)
class Row:
    """One method that was run, with what it reached and took."""

    problem: str
    label: str
    method: Method
    loss: float
    result: InputResult
    seconds: float = float("nan")
    memory: float = float("nan")
    image_set: int = 1


def baselines(problem: JointProblem, grid: Sequence[float], iterations: int) -> list[Row]:
    """Cold, warm, and cold as in the paper, all with the step size that suits them best.

    All three follow the same steps of x up to their tolerance, so it is chosen with the cheap one.
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
    """The smallest budget that reaches the goal, or the best of those that do not."""
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
    """The baselines, and each engine at the budget that equals the better of cold and warm."""
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
    result = Table(title=title, title_justify="left")
    columns = ("engine", "iterations", "step", "evaluations", "pull-backs", "ms an image")
    columns += ("÷ cold", "÷ warm", "÷ Broyden", "true loss", "residuals z, μ", "peak MiB")
    for column in columns:
        result.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        found, step = row.result, row.method.step_size
        reached = row.loss <= _goal(rows) or row in (cold, warm, paper)
        result.add_row(
            row.label,
            f"{row.method.iterations}",
            "" if step is None else f"{step:g}",
            f"{found.evaluations}",
            f"{found.vjps}",
            f"{1e3 * row.seconds / images:.2f}",
            *(_ratio(base.seconds / row.seconds, reached) for base in (cold, warm, paper)),
            f"{row.loss:.4f}",
            f"{float(found.state_residual.mean()):.0e}, {float(found.adjoint_residual.mean()):.0e}",
            "" if math.isnan(row.memory) else f"{row.memory:.0f}",
        )
    return result


def _goal(rows: Sequence[Row]) -> float:
    """The better of cold and warm sets it, for both ratios."""
    return min(row.loss for row in rows[:2])


def ratios(groups: Sequence[Sequence[Row]]) -> Table:
    """How many times faster than cold and warm the first engine is, problem by problem."""
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
    """How many times faster; in brackets where the loss is not equal yet."""
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
    parser.add_argument("--quick", action="store_true", help="tiny models, a minute")
    parser.add_argument("--data", help="where MNIST is (EQUILIBRIA_DATA)")
    parser.add_argument("--cache", type=Path, help="where trained models are kept")
    parser.add_argument("--problems", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", default=list(JOINT), help="ours first")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--sets", type=int, nargs="+", default=[1, 2], help="of test images")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every figure to a file")
    parser.add_argument("--figure", type=Path, help="draw loss against time for a decoder instead")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(chosen.data, chosen.cache or Path(folder), chosen.images)
        if chosen.quick:
            few = dict.fromkeys(setting.steps, 4)
            setting = replace(setting, images=8, training_images=200, steps=few)
        if chosen.figure is not None:
            from benchmarks.joint_figure import draw

            draw(JointProblem("MDEQ decoder", setting), chosen.figure)
            return 0
        groups: list[list[Row]] = []
        for name in chosen.problems:
            for place, image_set in enumerate(chosen.sets):
                there = replace(setting, image_set=image_set)
                found = measure(
                    JointProblem(name, there),
                    there,
                    chosen.engines,
                    chosen.repeats,
                    quick=chosen.quick,
                    with_memory=place == 0,
                )
                console.print(table(found, setting.images))
                groups.append(found)
                if chosen.json is not None:
                    rows = [as_data(row) for rows in groups for row in rows]
                    chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
        console.print(ratios(groups))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
