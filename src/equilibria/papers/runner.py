"""All runs of a table: rows × seeds."""

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
"""The folder of all runs, in that of the results."""


@dataclass(frozen=True)
class TablePlan:
    """The runs that a table asks for. Rows with the same recipe share theirs.

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
    """By the label of the row and the seed."""

    def unfinished(self) -> list[Job]:
        """Those without a result, each once; seed by seed, so that all rows get on alike."""
        ordered = sorted(self.jobs.items(), key=lambda item: self.seeds.index(item[0][1]))
        by_folder = {job.folder: job for _, job in ordered if job.result() is None}
        return list(by_folder.values())

    def row_of(self, job: Job) -> str:
        """Where a job belongs, for people."""
        return next(
            f"{label}, seed {seed}"
            for (label, seed), other in self.jobs.items()
            if other.folder == job.folder
        )


@dataclass
class Findings:
    """The results of a plan: by row and seed, and what went wrong."""

    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """By row and seed, in words."""

    def of(self, row: Row) -> list[Result]:
        return list(self.results.get(row.label, {}).values())


def plan(
    table: PaperTable,
    setting: Setting,
    seeds: Sequence[int],
    output: Path,
    *,
    root: Path | None = None,
) -> TablePlan:
    """What to run, and where. Wrong recipes are found here, before anything runs.

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


def check_data(made: TablePlan) -> None:
    """Look for the data of all rows: `MissingDataError` says what is missing and how to get it."""
    recipes = (recipe_from_data(job.recipe) for job in made.jobs.values())
    for data in {recipe.data.name: recipe.data for recipe in recipes}.values():
        load_dataset(data.name, root=data.root, **data.options)


def carry_out(
    made: TablePlan,
    *,
    workers: int | None,
    device: torch.device,
    on_epoch: Callable[[Job, EpochMetrics], None] | None = None,
) -> Generator[JobOutcome, None, None]:
    """Run what is unfinished: with so many processes, or, for None, here and on the device."""
    jobs = made.unfinished()
    if workers is not None:
        yield from run_jobs(jobs, workers)
        return
    for job in jobs:
        yield attempt(job, device, None if on_epoch is None else partial(on_epoch, job))


def findings(made: TablePlan, outcomes: Sequence[JobOutcome]) -> Findings:
    """The results on disk, of this call and earlier ones, and the errors of this call.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0], Path("tables"))
        >>> from equilibria.papers.runner import findings
        >>> findings(plan, []).failures  # nothing has run yet
        {}
    """
    found = Findings()
    for (label, seed), job in made.jobs.items():
        result = job.result()
        if result is not None:
            found.results.setdefault(label, {})[seed] = result
    for outcome in outcomes:
        if outcome.error:
            found.failures[made.row_of(outcome.job)] = outcome.error
    return found


def model_sizes(made: TablePlan) -> dict[str, int]:
    """The number of parameters of every row; nothing is allocated for them.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0], Path("tables"))
        >>> from equilibria.papers.runner import model_sizes
        >>> model_sizes(plan)["DNN"]
        12774
    """
    loaded: dict[str, DataSet | None] = {}
    sizes: dict[str, int] = {}
    for (label, _), job in made.jobs.items():
        if label not in sizes:
            recipe = recipe_from_data(job.recipe)
            key = repr(recipe.data)
            if key not in loaded:
                loaded[key] = _data_if_here(recipe)
            sizes[label] = parameter_count(_outline(recipe, loaded[key]))
    return sizes


def _data_if_here(recipe: Recipe) -> DataSet | None:
    try:
        return load_dataset(recipe.data.name, root=recipe.data.root, **recipe.data.options)
    except MissingDataError:
        return None


def _outline(recipe: Recipe, data: DataSet | None) -> nn.Module:
    """For the classes and channels of the data; where it is not here, its card knows classes."""
    name = recipe.model.name
    fitting = {"num_classes": dataset_card(recipe.data.name).classes}
    if data is not None:
        fitting = fitting_options(name, data)
    known = model_options(name)
    fitting = {key: value for key, value in fitting.items() if key in known}
    return model_outline(name, **{**fitting, **recipe.model.options})
