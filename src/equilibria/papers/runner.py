"""Runs of a table: every row with every seed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from equilibria.data import DataSet, MissingDataError, dataset_card, load_dataset
from equilibria.models import model_options
from equilibria.models.registry import model_outline, parameter_count
from equilibria.papers.jobs import Job, JobOutcome, attempt, make_job, run_jobs
from equilibria.papers.measures import Result
from equilibria.papers.table import PaperTable, Row, Setting
from equilibria.training import EpochMetrics, Recipe
from equilibria.training.experiment import fitting_options
from equilibria.training.recipe import recipe_from_data

RUNS = "runs"
"""Name of the folder with all runs, inside the folder of the results."""


@dataclass(frozen=True)
class TablePlan:
    """The runs that a table needs. Rows with equal recipes share their runs.

    Attributes:
        table: The table.
        setting: "full" or "quick".
        seeds: Seeds of the runs.
        jobs: Jobs by the label of the row and the seed.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0, 1], Path("tables"))
        >>> plan.seeds, len(plan.unfinished()) > 0
        ((0, 1), True)
    """

    table: PaperTable
    setting: Setting
    seeds: tuple[int, ...]
    jobs: dict[tuple[str, int], Job]

    def unfinished(self) -> list[Job]:
        """Return the distinct jobs without a result, ordered by seed so that all rows progress."""
        ordered = sorted(self.jobs.items(), key=lambda item: self.seeds.index(item[0][1]))
        by_folder = {job.folder: job for _, job in ordered if job.result() is None}
        return list(by_folder.values())

    def row_of(self, job: Job) -> str:
        """Return the row and the seed of a job, as text for messages."""
        return next(
            f"{label}, seed {seed}"
            for (label, seed), other in self.jobs.items()
            if other.folder == job.folder
        )


@dataclass
class Findings:
    """Results and error messages of the runs of a table's plan.

    Attributes:
        results: Results by the label of the row and the seed.
        failures: Error messages by "row, seed N".
    """

    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, row: Row) -> list[Result]:
        """Return the results of a row, one per seed."""
        return list(self.results.get(row.label, {}).values())


def plan(
    table: PaperTable,
    setting: Setting,
    seeds: Sequence[int],
    output: Path,
    *,
    root: Path | None = None,
) -> TablePlan:
    """Plan the runs of a table, and check the recipes before anything runs.

    Args:
        table: The table.
        setting: "full" for the setting of the paper, "quick" for a small one.
        seeds: Seeds; every row runs with each.
        output: Folder of the results; the runs are in its folder `runs`.
        root: Folder of the data sets; by default that of the recipes.

    Returns:
        The plan, for `carry_out` and `write_report`.

    Raises:
        ValueError: If a recipe is wrong.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0, 1], Path("tables"))
        >>> plan.setting, plan.seeds
        ('quick', (0, 1))
    """
    jobs = {}
    for row in table.rows:
        recipe = row.recipe(setting)
        if recipe is None:
            continue
        for seed in seeds:
            jobs[row.label, seed] = make_job(
                recipe,
                seed,
                output / RUNS,
                extras=table.extras,
                pictures=table.pictures if seed == seeds[0] else (),
                root=root,
            )
    return TablePlan(table, setting, tuple(seeds), jobs)


def check_data(plan: TablePlan) -> None:
    """Check that the data sets of all rows are available.

    Raises:
        MissingDataError: If one is missing; the message explains how to get it.
    """
    recipes = (recipe_from_data(job.recipe) for job in plan.jobs.values())
    for data in {recipe.data.name: recipe.data for recipe in recipes}.values():
        load_dataset(data.name, root=data.root, **data.options)


def carry_out(
    plan: TablePlan,
    *,
    workers: int | None,
    device: torch.device,
    on_epoch: Callable[[Job, EpochMetrics], None] | None = None,
) -> Generator[JobOutcome, None, None]:
    """Run the unfinished jobs of a plan and yield their outcomes.

    Args:
        plan: Plan of a table.
        workers: Number of processes on the CPU; None runs the jobs in this process on `device`.
        device: Device of jobs in this process.
        on_epoch: Callback for each epoch of a job; only without `workers`.

    Yields:
        The outcome of each job as it finishes.
    """
    jobs = plan.unfinished()
    if workers is not None:
        yield from run_jobs(jobs, workers)
        return
    for job in jobs:
        yield attempt(job, device, None if on_epoch is None else partial(on_epoch, job))


def findings(plan: TablePlan, outcomes: Sequence[JobOutcome]) -> Findings:
    """Collect the results on disk and the errors of this call.

    Args:
        plan: Plan of a table.
        outcomes: Outcomes of this call (`carry_out`).

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0], Path("tables"))
        >>> from equilibria.papers.runner import findings
        >>> findings(plan, []).failures  # nothing has run yet
        {}
    """
    collected = Findings()
    for (label, seed), job in plan.jobs.items():
        result = job.result()
        if result is not None:
            collected.results.setdefault(label, {})[seed] = result
    for outcome in outcomes:
        if outcome.error:
            collected.failures[plan.row_of(outcome.job)] = outcome.error
    return collected


def model_sizes(plan: TablePlan) -> dict[str, int]:
    """Count the parameters of every row without allocating them.

    Args:
        plan: Plan of a table.

    Returns:
        Number of parameters by the label of the row.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0], Path("tables"))
        >>> from equilibria.papers.runner import model_sizes
        >>> model_sizes(plan)["DNN"]
        12774
    """
    loaded: dict[str, DataSet | None] = {}
    sizes: dict[str, int] = {}
    for (label, _), job in plan.jobs.items():
        if label not in sizes:
            recipe = recipe_from_data(job.recipe)
            key = repr(recipe.data)
            if key not in loaded:
                loaded[key] = _available_data(recipe)
            sizes[label] = parameter_count(_outline(recipe, loaded[key]))
    return sizes


def _available_data(recipe: Recipe) -> DataSet | None:
    try:
        return load_dataset(recipe.data.name, root=recipe.data.root, **recipe.data.options)
    except MissingDataError:
        return None


def _outline(recipe: Recipe, data: DataSet | None) -> nn.Module:
    """Outline a model for its data; if the data is missing, the card has the number of classes."""
    name = recipe.model.name
    fitting = {"num_classes": dataset_card(recipe.data.name).classes}
    if data is not None:
        fitting = fitting_options(name, data)
    known = model_options(name)
    fitting = {key: value for key, value in fitting.items() if key in known}
    return model_outline(name, **{**fitting, **recipe.model.options})
