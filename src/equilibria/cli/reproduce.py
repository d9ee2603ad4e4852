"""`equilibria reproduce`: reproduce tables of papers, and run studies."""

from __future__ import annotations

import os
import shlex
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import yaml
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn
from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import DataRoot, Device, command
from equilibria.cli.console import (
    output_console,
    print_json,
    print_table,
    progress_bar,
    say,
)
from equilibria.cli.datasets import known_root, whereabouts
from equilibria.cli.faults import INTERRUPTED, fail, writable_folder


@command(
    "reproduce",
    "equilibria reproduce",
    "equilibria reproduce mopteqs-t1b --quick",
    "equilibria reproduce geq-t1a --seeds 5 --device cuda --root data",
    "equilibria reproduce jiio-t5 --settings",
    "equilibria reproduce hhd --quick --seeds 25",
    "equilibria reproduce digits models=[opteq-small] validate=true",
    "equilibria reproduce --redraw results",
)
def reproduce(
    table: Annotated[
        str | None,
        Argument(metavar="ID", help="ID of a table or study; without it, all are listed."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Settings of a study (listed by --settings)."),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Use a small setting that takes minutes on a CPU.")
    ] = False,
    output: Annotated[
        Path, Option(help="Folder for results and runs; finished runs are reused.")
    ] = Path("results"),
    seeds: Annotated[
        int | None,
        Option(min=1, help="Number of seeds (default: 3, or 6 for studies that decide claims)."),
    ] = None,
    workers: Annotated[
        int | None, Option(min=1, help="Number of processes with --quick (default: all cores).")
    ] = None,
    device: Device = "auto",
    root: DataRoot = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print recipes and model sizes, and run nothing.")
    ] = False,
    settings: Annotated[
        bool,
        Option(
            "--settings", help="Compare all full settings with those of the paper, and run nothing."
        ),
    ] = False,
    index: Annotated[
        Path | None, Option(help="Print a Markdown list of the results in this folder.")
    ] = None,
    redraw: Annotated[
        Path | None,
        Option(help="Redraw the figures of the tables in this folder from their records."),
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print the list, or the results, as JSON.")
    ] = False,
) -> None:
    """Reproduce a table of a paper, or run a study."""
    if index is not None:
        print(eq.papers.report.write_index(index), end="")
        return
    if redraw is not None:
        drawn = eq.papers.report.redraw(redraw)
        if not drawn:
            raise FileNotFoundError(
                f"{redraw} has no records of tables; give a results folder of `equilibria "
                "reproduce`"
            )
        say(f"Written: {', '.join(map(str, drawn))}")
        return
    if table is None:
        _show_tables(root, as_json)
        return
    study = next((study for study in eq.papers.list_studies() if study.id == table), None)
    if study is not None:
        if dry_run:
            raise ValueError(f"--dry-run is for tables, and {table} is a study; remove it")
        options = {"quick": quick, "seeds": seeds, "workers": workers, "root": root}
        _carry_out_study(study, changes or [], options, output, settings, as_json)
        return
    paper_table = eq.papers.find_table(table)
    if changes:
        raise ValueError(
            f"KEY=VALUE settings are for studies, and {table} is a table; remove {changes[0]!r}, "
            "or train a custom recipe with `equilibria train RECIPE KEY=VALUE`"
        )
    if settings:
        _show_settings(paper_table)
        return
    setting: eq.papers.table.Setting = "quick" if quick else "full"
    plan = eq.papers.plan(
        paper_table, setting, range(seeds or paper_table.seeds), output, root=root
    )
    if dry_run:
        _show_plan(plan)
        return
    torch_device = eq.training.processes.choose_device(device)
    eq.papers.runner.check_data(plan)
    writable_folder(output)
    count = (workers or os.cpu_count() or 1) if quick and torch_device.type == "cpu" else None
    console = Console(stderr=True) if as_json else output_console()
    display = _Display(console, plan, len(plan.unfinished()))
    outcomes: list[eq.papers.jobs.JobOutcome] = []
    try:
        with (
            display.progress,
            closing(
                eq.papers.carry_out(
                    plan, workers=count, device=torch_device, on_epoch=display.on_epoch
                )
            ) as running,
        ):
            for outcome in running:
                outcomes.append(outcome)
                display.on_outcome(outcome)
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to continue", INTERRUPTED)
    findings = eq.papers.runner.findings(plan, outcomes)
    files = eq.papers.write_report(
        plan, findings, output, _command(plan, seeds), eq.papers.report.provenance()
    )
    heading, *rows = eq.papers.report.cells(plan, findings)
    if as_json:
        print_json([dict(zip(heading, row, strict=True)) for row in rows])
    else:
        print_table(heading, rows, right=heading[1:])
        say(f"Written: {', '.join(map(str, files))}")
    if findings.failures:
        lines = "\n".join(f"{run}: {error}" for run, error in findings.failures.items())
        fail(f"{len(findings.failures)} runs failed:\n{lines}", code=1)


def _carry_out_study(
    study: eq.papers.Study,
    changes: list[str],
    options: dict[str, Any],
    output: Path,
    show_settings: bool,
    as_json: bool,
) -> None:
    """Run a study with a progress bar; print its tables and the names of its files."""
    if show_settings:
        print_table(("Setting", "Default"), study.defaults())
        return
    configured = study.configure(changes, **options)
    writable_folder(output)
    console = Console(stderr=True) if as_json else output_console()
    progress = progress_bar(console=console)
    task = progress.add_task("", total=None)

    def on_progress(done: float, runs: int, title: str) -> None:
        progress.update(task, completed=done, total=runs, description=title)

    def report(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    try:
        with progress:
            result = study.carry_out(
                configured, eq.papers.studies.study.Work(output, report, on_progress)
            )
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to continue", INTERRUPTED)
    if as_json:
        print_json(result.record)
    else:
        print(result.text)
        say(f"Written: {', '.join(map(str, result.files))}")
    if not result.is_complete:
        fail("some runs failed; see the messages above", code=1)


class _Display:
    """Progress bar on terminals; elsewhere one line per finished run."""

    def __init__(self, console: Console, plan: eq.papers.runner.TablePlan, total: int) -> None:
        self.console = console
        self.plan = plan
        self.total = total
        self.done = 0
        self.progress = progress_bar(
            TextColumn("{task.completed:.0f}/{task.total:.0f} runs [dim]{task.description}[/]"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self.task = self.progress.add_task("", total=total)

    def on_epoch(self, job: eq.papers.jobs.Job, metrics: eq.training.EpochMetrics) -> None:
        epochs = job.recipe["training"]["epochs"]
        label = f"{self.plan.row_of(job)}, epoch {metrics.epoch}/{epochs}"
        if self.console.is_terminal:
            share = self.done + metrics.epoch / epochs
            self.progress.update(self.task, completed=share, description=label)
        else:
            self.console.print(f"{label}: loss {metrics.loss:.4f}", markup=False, soft_wrap=True)

    def on_outcome(self, outcome: eq.papers.jobs.JobOutcome) -> None:
        self.done += 1
        label = self.plan.row_of(outcome.job)
        self.progress.update(self.task, completed=self.done, description=label)
        measured = outcome.result or {}
        figures = {
            n: v for n, v in measured.items() if n in eq.report.labels.FIGURES and v is not None
        }
        facts = outcome.error or ", ".join(
            f"{name} {value}" for name, value in eq.report.labels.figure_rows(figures)
        )
        if outcome.error or not self.console.is_terminal:
            line = f"{self.done}/{self.total} {label}: {facts}"
            self.console.print(line, markup=False, soft_wrap=True)


def _show_tables(root: Path | None, as_json: bool) -> None:
    """List tables and studies, and whether the data of tables is available."""
    base = known_root(root)
    headings = ("ID", "Paper", "Table", "Data", "Here?", "Data (--quick)", "Here?")
    rows = []
    settings: tuple[eq.papers.table.Setting, ...] = ("full", "quick")
    for table in eq.papers.list_tables():
        data = []
        for setting in settings:
            names = table.data_sets(setting)
            missing = any(whereabouts(eq.data.dataset_card(name), base) == "no" for name in names)
            data += [", ".join(names), "no" if missing else "yes"]
        rows.append((table.id, table.paper, table.title, *data))
    if as_json:
        keys = ("id", "paper", "title", "data", "here", "quick_data", "quick_here")
        listed = [{"kind": "table", **dict(zip(keys, row, strict=True))} for row in rows]
        listed += [
            {"kind": "study", "id": study.id, "paper": study.paper, "title": study.title}
            for study in eq.papers.list_studies()
        ]
        print_json(listed)
        return
    print_table(headings, rows, unbroken=("ID",))
    others = [
        (other.id, other.paper, other.title, other.why or f"run with {other.table}")
        for other in eq.papers.table.list_elsewhere()
    ]
    print_table(("ID", "Paper", "Other results", "Where, or why not"), others, unbroken=("ID",))
    studies = [(study.id, study.paper or "–", study.title) for study in eq.papers.list_studies()]
    print_table(("ID", "Paper", "Studies"), studies, unbroken=("ID",))
    say("Run one of them: equilibria reproduce ID --quick")


def _show_settings(table: eq.papers.PaperTable) -> None:
    """Print each setting of the paper and ours, the reason for differences, and the rows."""
    from equilibria.papers.settings import compared_settings

    count = sum(row.full is not None for row in table.rows)
    rows = [
        (
            line.name,
            line.paper,
            line.ours,
            line.why,
            "all" if len(line.rows) == count else "; ".join(line.rows),
        )
        for line in compared_settings(table)
    ]
    print_table(("Setting", "Paper", "Ours", "Why", "Rows"), rows)
    for row in table.rows:
        if row.full is None:
            say(f"{row.label}: not run: {row.missing}")


def _show_plan(plan: eq.papers.runner.TablePlan) -> None:
    sizes = eq.papers.runner.model_sizes(plan)
    for row in plan.table.rows:
        say(row.label)
        if row.label not in sizes:
            say(f"not run: {row.missing}\n")
            continue
        jobs = [plan.jobs[row.label, seed] for seed in plan.seeds]
        say(f"{sizes[row.label]:,} parameters")
        for job in jobs:
            state = "finished" if job.result() is not None else "to run"
            say(f"{job.folder} ({state})")
        text = yaml.safe_dump(dict(jobs[0].recipe), sort_keys=False, allow_unicode=True)
        say(text)


def _command(plan: eq.papers.runner.TablePlan, seeds: int | None) -> str:
    """Return the command for the results, without options that do not affect them."""
    words = ["equilibria", "reproduce", plan.table.id]
    words += ["--quick"] if plan.setting == "quick" else []
    words += ["--seeds", str(seeds)] if seeds is not None else []
    return shlex.join(words)
