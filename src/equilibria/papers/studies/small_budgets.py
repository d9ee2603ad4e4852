"""Comparison of model families with few parameters.

    equilibria reproduce small-budgets [budgets=[5000,20000]] [--seeds 3]
    equilibria reproduce small-budgets 'families=[OptEq, monDEQ, "ResNet, 1 block"]'

The width of every model is chosen to match the number of parameters. All share CIFAR-10, the stem
(two strided convolutions, features of 8×8), the learning rate and the number of epochs. A residual
network is also trained for twice the epochs, because equilibrium models take longer per epoch. Runs
are kept, shared and resumed like those of the papers' tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria.models.registry import model_outline, nearest_width, parameter_count
from equilibria.papers.jobs import Job, make_job, run_jobs
from equilibria.papers.measures import deviation
from equilibria.papers.runner import RUNS
from equilibria.papers.studies.study import Study, StudyOutcome, Work, markdown_table
from equilibria.registry import nearest
from equilibria.report.style import (
    drawing,
    dress_axes,
    figure_png,
    legend_below,
    legend_columns,
    plain_axis,
    plain_log_axis,
    series,
)

BUDGETS = (5_000, 20_000)
STEM: dict[str, Any] = {"stem_depth": 2, "stem_strides": 2}
BRANCHES: dict[str, Any] = {**STEM, "scales": [1, 1, 2], "pool": 2}
DATA: dict[str, Any] = {
    "name": "cifar10",
    "options": {"train_samples": 5000},
    "augmentation": [{"crop": {"padding": 4}}, "flip"],
    "normalize": True,
}
TRAINING: dict[str, Any] = {
    "epochs": 12,
    "batch_size": 64,
    "learning_rate": 5e-3,
    "weight_decay": 0.05,
    "tolerance": 1e-2,
    "evaluation_tolerance": 1e-3,
    "gradient": "one_step",
}
Result = Mapping[str, float | None]


@dataclass(frozen=True)
class Family:
    """A model family with the width as its only parameter.

    Attributes:
        title: Title in the table.
        model: Registered name of the model.
        options: Options of the model as a function of the width.
        longer: Factor of the number of epochs.
    """

    title: str
    model: str
    options: Callable[[int], dict[str, Any]]
    longer: int = 1

    def parameters(self, width: int) -> int:
        fitting = {"num_classes": 10, "in_channels": 3}
        return parameter_count(model_outline(self.model, **fitting, **self.options(width)))

    def recipe(self, budget: int) -> dict[str, Any]:
        width = nearest_width(self.parameters, budget, remedy="raise budgets")
        return {
            "model": {"name": self.model, "options": self.options(width)},
            "data": DATA,
            "training": {**TRAINING, "epochs": self.longer * TRAINING["epochs"]},
        }


def _resnet(blocks: int) -> Callable[[int], dict[str, Any]]:
    return lambda width: {**STEM, "channels": [width], "blocks": [blocks]}


FAMILIES = (
    Family("ResNet, 1 block", "resnet-small", _resnet(1)),
    Family("ResNet, 1 block, twice the epochs", "resnet-small", _resnet(1), longer=2),
    Family("ResNet, 3 blocks", "resnet-small", _resnet(3)),
    Family("OptEq", "opteq-small", lambda c: {**STEM, "channels": c, "width": c, "pool": 2}),
    Family(
        "Deep OptEq",
        "deep-opteq-small",
        lambda c: {**STEM, "channels": c, "widths": [c, c], "pool": 2},
    ),
    Family("MOptEqs", "mopteq-small", lambda c: {**BRANCHES, "channels": c, "widths": [c, c, c]}),
    Family("monDEQ", "mondeq-small", lambda c: {**STEM, "channels": c, "pool": 2}),
)


def jobs(
    families: Sequence[Family],
    budgets: Sequence[int],
    seeds: int,
    runs: Path,
    root: Path | None = None,
) -> dict[tuple[str, int], list[Job]]:
    """Return the training jobs of the study, one per seed, by title of the family and budget.

    Args:
        families: Model families.
        budgets: Numbers of parameters; each family gets the width that comes closest.
        seeds: Number of seeds.
        runs: Folder that contains the folders of all runs.
        root: Folder of the data sets; by default that of the recipes.
    """
    return {
        (family.title, budget): [
            make_job(family.recipe(budget), seed, runs, root=root) for seed in range(seeds)
        ]
        for budget in budgets
        for family in families
    }


def table(by_family: Mapping[tuple[str, int], Sequence[Result]]) -> list[list[str]]:
    """Return the header and one row per model family and budget.

    Args:
        by_family: Results of all seeds, by title of the family and budget (number of parameters).
    """
    rows = [["model", "parameters", "accuracy (%)", "training (CPU min)", "iterations"]]
    for (title, _), results in by_family.items():
        scores = [100 * float(r["accuracy"] or 0) for r in results]
        minutes = [float(r["training_minutes"] or 0) for r in results]
        iterations = [r["mean_iterations"] for r in results if r["mean_iterations"] is not None]
        rows.append(
            [
                title,
                f"{results[0]['parameters']:,.0f}",
                f"{statistics.fmean(scores):.2f} ± {deviation(scores):.2f}",
                f"{statistics.fmean(minutes):.2f}",
                f"{statistics.fmean(iterations):.1f}" if iterations else "–",
            ]
        )
    return rows


@drawing()
def picture(by_family: Mapping[tuple[str, int], Sequence[Result]]) -> bytes:
    """Draw the accuracy over the number of parameters, one line per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    families = list(dict.fromkeys(title for title, _ in by_family))
    for place, family in enumerate(families):
        points = [results for (title, _), results in by_family.items() if title == family]
        across = [float(results[0]["parameters"] or 0) for results in points]
        scores = [[100 * float(r["accuracy"] or 0) for r in results] for results in points]
        means = [statistics.fmean(s) for s in scores]
        spread = [deviation(s) for s in scores]
        axes.errorbar(across, means, yerr=spread, capsize=3, label=family, **series(place))
    axes.set(xlabel="parameters", ylabel="test accuracy (%)")
    plain_log_axis(axes, "x")
    plain_axis(axes)
    dress_axes(axes)
    legend_below(figure, axes.get_legend_handles_labels()[0], legend_columns(families, 7.2))
    return figure_png(figure)


@dataclass(frozen=True)
class SmallBudgetSettings:
    """Settings of the study.

    Args:
        budgets: Numbers of parameters.
        families: Titles of families; all of them if empty.
        seeds: Number of seeds.
        workers: Number of processes.
        root: Folder of the data sets.
    """

    budgets: tuple[int, ...] = BUDGETS
    families: tuple[str, ...] = ()
    seeds: int = 3
    workers: int = 1
    root: Path | None = None


def carry_out(settings: SmallBudgetSettings, work: Work) -> StudyOutcome:
    """Train each family at each budget, once per seed."""
    titles = [family.title for family in FAMILIES]
    for title in settings.families:
        if title not in titles:
            raise ValueError(f"unknown family {title!r}{nearest(title, titles)}")
    families = [f for f in FAMILIES if f.title in (settings.families or titles)]
    planned = jobs(families, settings.budgets, settings.seeds, work.output / RUNS, settings.root)
    unfinished = [job for group in planned.values() for job in group if job.result() is None]
    for done, outcome in enumerate(run_jobs(unfinished, settings.workers), start=1):
        accuracy = (outcome.result or {}).get("accuracy")
        message = outcome.error or ("" if accuracy is None else f"{accuracy:.2%}")
        work.report(f"{done}/{len(unfinished)} {outcome.job.folder.name}: {message}")
    results = {
        place: [result for job in group if (result := job.result()) is not None]
        for place, group in planned.items()
    }
    finished = {place: group for place, group in results.items() if group}
    return StudyOutcome(
        data={
            "rows": [
                {"model": title, "budget": budget, "runs": group}
                for (title, budget), group in finished.items()
            ]
        },
        text="\n".join(markdown_table(table(finished))),
        about=f"CIFAR-10: {DATA['options']['train_samples']:,} images to train on, all 10,000 test "
        f"images; {TRAINING['epochs']} epochs of AdamW unless stated otherwise, features of "
        f"8×8; mean ± standard deviation over {settings.seeds} seeds.",
        picture=picture(finished) if finished else None,
        is_complete=all(len(group) == settings.seeds for group in results.values()),
    )


STUDY = Study("small-budgets", "", "Models with few parameters", SmallBudgetSettings, carry_out)
