"""`equilibria reproduce`: a paper's table, run again and set beside its figures."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from equilibria.cli.console import FIGURES, fail, figure_rows
from equilibria.data import DataFileError, MissingDataError, data_root, dataset_card
from equilibria.papers import (
    Job,
    Outcome,
    PaperTable,
    Plan,
    Setting,
    carry_out,
    cells,
    check_data,
    find_table,
    findings,
    list_tables,
    model_sizes,
    plan,
    provenance,
    write_report,
)
from equilibria.training import EpochMetrics, choose_device

WIDTH_OF_A_FILE = 160
"""Columns where the output is not a terminal."""


def show_tables(root: Path | None) -> None:
    """The tables there are, and whether their data is here."""
    console = _console()
    table = Table(box=box.SIMPLE)
    for column in ("ID", "Paper", "What", "Data", "Here?", "Data (--quick)", "Here?"):
        table.add_column(column, no_wrap=column == "ID")
    for found in list_tables():
        table.add_row(
            found.id,
            found.paper,
            found.title,
            *_data(found, "full", root),
            *_data(found, "quick", root),
        )
    console.print(table)
    console.print("Run one: equilibria reproduce ID --quick")


def run_reproduction(
    *,
    table_id: str,
    quick: bool,
    output: Path,
    seeds: int | None,
    workers: int | None,
    device_name: str,
    root: Path | None,
    dry_run: bool,
) -> None:
    """Run a table, or show what would be run."""
    console = _console()
    setting: Setting = "quick" if quick else "full"
    try:
        table = find_table(table_id)
        made = plan(table, setting, range(seeds or table.seeds), output, root=root)
        if dry_run:
            _show_plan(console, made)
            return
        device = choose_device(device_name)
        check_data(made)
    except (MissingDataError, DataFileError, ValueError, TypeError, OSError) as error:
        fail(str(error))
    count = None
    if quick and device.type == "cpu":
        count = workers or os.cpu_count() or 1
    display = _Display(console, made, len(made.unfinished()))
    outcomes: list[Outcome] = []
    try:
        with (
            display.progress,
            closing(carry_out(made, workers=count, device=device, on_epoch=display.on_epoch)) as it,
        ):
            for outcome in it:
                outcomes.append(outcome)
                display.on_outcome(outcome)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where this one stopped", code=130)
    found = findings(made, outcomes)
    files = write_report(made, found, output, _command(made, seeds), provenance())
    console.print(_result(cells(made, found)))
    console.print(f"Written: {', '.join(map(str, files))}", markup=False, soft_wrap=True)
    if found.failures:
        lines = "\n".join(f"{place}: {error}" for place, error in found.failures.items())
        fail(f"{len(found.failures)} runs failed:\n{lines}", code=1)


class _Display:
    """A progress bar on a terminal; elsewhere one plain line a finished run."""

    def __init__(self, console: Console, made: Plan, total: int) -> None:
        self.console = console
        self.made = made
        self.total = total
        self.done = 0
        self.progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f} runs [dim]{task.description}[/]"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=total)

    def on_epoch(self, job: Job, metrics: EpochMetrics) -> None:
        epochs = job.recipe["training"]["epochs"]
        place = f"{self.made.row_of(job)}, epoch {metrics.epoch}/{epochs}"
        if self.console.is_terminal:
            share = self.done + metrics.epoch / epochs
            self.progress.update(self.task, completed=share, description=place)
        else:
            self.console.print(f"{place}: loss {metrics.loss:.4f}", markup=False, soft_wrap=True)

    def on_outcome(self, outcome: Outcome) -> None:
        self.done += 1
        place = self.made.row_of(outcome.job)
        self.progress.update(self.task, completed=self.done, description=place)
        facts = outcome.error or ", ".join(
            f"{label} {value}" for label, value in figure_rows(_figures(outcome.result or {}))
        )
        if outcome.error or not self.console.is_terminal:
            line = f"{self.done}/{self.total} {place}: {facts}"
            self.console.print(line, markup=False, soft_wrap=True)


def _figures(result: dict[str, float | None]) -> dict[str, float | None]:
    """Of all the numbers of a run, those that say how well it did."""
    return {name: value for name, value in result.items() if name in FIGURES}


def _show_plan(console: Console, made: Plan) -> None:
    import yaml

    sizes = model_sizes(made)
    for row in made.table.rows:
        console.print(f"[bold]{row.label}[/bold]", highlight=False)
        if row.label not in sizes:
            console.print(f"not run: {row.missing}\n", markup=False)
            continue
        jobs = [made.jobs[row.label, seed] for seed in made.seeds]
        console.print(f"{sizes[row.label]:,} parameters", markup=False)
        for job in jobs:
            state = "finished" if job.result() is not None else "to run"
            console.print(f"{job.folder} ({state})", markup=False, soft_wrap=True)
        text = yaml.safe_dump(dict(jobs[0].recipe), sort_keys=False, allow_unicode=True)
        console.print(text, markup=False, soft_wrap=True)


def _data(table: PaperTable, setting: Setting, root: Path | None) -> tuple[str, str]:
    names = table.data_sets(setting)
    try:
        base: Path | None = data_root(root)
    except MissingDataError:
        base = None
    cards = [dataset_card(name) for name in names]
    here = all(
        not card.folders or (base is not None and card.find(base) is not None) for card in cards
    )
    return ", ".join(names), "yes" if here else "no"


def _result(rows: Sequence[Sequence[str]]) -> Table:
    heading, *body = rows
    table = Table(box=box.SIMPLE)
    for place, title in enumerate(heading):
        table.add_column(title, justify="left" if place == 0 else "right")
    for row in body:
        table.add_row(*row)
    return table


def _command(made: Plan, seeds: int | None) -> str:
    """The command that gives the same figures: what is left out does not matter to them."""
    words = ["equilibria", "reproduce", made.table.id]
    words += ["--quick"] if made.setting == "quick" else []
    words += ["--seeds", str(seeds)] if seeds is not None else []
    return shlex.join(words)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_OF_A_FILE)
