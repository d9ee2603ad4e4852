"""Reports of finished tables as Markdown, JSON and PNG, and the index of recorded tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import equilibria
from equilibria.papers.measures import Result, collect, deviation, measure_of
from equilibria.papers.plots import table_png
from equilibria.papers.runner import Findings, TablePlan
from equilibria.papers.table import Row, find_table
from equilibria.training.files import write_atomically

KIND = "equilibria reproduce"
"""Value of the key "kind" in the JSON files of recorded tables."""
EMPTY_CELL = "–"


def base_name(plan: TablePlan) -> str:
    """Return the stem of the files of a table."""
    return plan.table.id if plan.setting == "full" else f"{plan.table.id}-quick"


def write_report(
    plan: TablePlan, results: Findings, output: Path, command: str, facts: Mapping[str, Any]
) -> list[Path]:
    """Write the report of a paper's table as Markdown, JSON and PNG, and copy the runs' pictures.

    With ID the table's id, the files are ID.md, ID.json and ID.png, or ID-quick.* in the quick
    setting.

    Args:
        plan: Runs of the table.
        results: Results of the runs, from `findings`.
        output: Folder of the files; it is created if necessary.
        command: Command that produced the results.
        facts: Date, versions and hardware, from `provenance`.

    Returns:
        Paths of all files written, including the pictures copied from the run folders.
    """
    name = base_name(plan)
    record = as_data(plan, results, command, facts)
    contents = {
        "md": markdown(plan, results, command, facts).encode(),
        "json": (json.dumps(record, indent=1) + "\n").encode(),
        "png": table_png(plan.table, record),
    }
    output.mkdir(parents=True, exist_ok=True)
    files = []
    for ending, content in contents.items():
        files.append(output / f"{name}.{ending}")
        write_atomically(files[-1], content)
    for name, (_, source) in drawings(plan).items():
        files.append(output / name)
        write_atomically(files[-1], source.read_bytes())
    return files


def drawings(plan: TablePlan) -> dict[str, tuple[str, Path]]:
    """Return the pictures of runs by file name: the label of the first row, and the source.

    The name is that of the run, so that rows and tables that share a run share its pictures.
    """
    pictures: dict[str, tuple[str, Path]] = {}
    for (label, _), job in plan.jobs.items():
        for picture_name in job.pictures:
            source = job.picture(picture_name)
            if source.is_file():
                pictures.setdefault(f"{job.folder.name}-{picture_name}.png", (label, source))
    return pictures


def cells(plan: TablePlan, results: Findings) -> list[list[str]]:
    """Return the header and the rows of a table, our numbers beside those of the paper.

    Columns without a printed number have our numbers only.

    Args:
        plan: Runs of the table.
        results: Results of the runs.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0], Path("tables"))
        >>> from equilibria.papers.report import cells
        >>> from equilibria.papers.runner import findings
        >>> cells(plan, findings(plan, []))[0][:3]
        ['row', 'accuracy (%)', 'paper: Acc.']
    """
    heading = ["row"]
    printed = {
        title for row in plan.table.rows for title in row.paper
    }  # figures may print no numbers
    for column in plan.table.columns:
        if column.measure is not None:
            title, at = measure_of(column.measure).title, "@" in column.measure
            measures = {row.measure(column) for row in plan.table.rows if not row.missing}
            titles = {measure_of(name).title for name in measures if name is not None}
            if len(titles) > 1:  # the measure depends on the row
                title, at = column.title, False
            heading.append(f"{title}, {column.title}" if at else title)
        if column.title in printed:
            heading.append(f"paper: {column.title}")
    rows = [[*heading, "parameters", "CPU min", "converged"]]
    for row in plan.table.rows:
        runs = results.of(row)
        line = [row.label]
        for column in plan.table.columns:
            if column.measure is not None:
                line.append(_ours(row.measure(column), runs))
            if column.title in printed:
                line.append(row.paper.get(column.title, EMPTY_CELL))
        rows.append([*line, *_costs(runs)])
    return [list(line) for line in zip(*rows, strict=True)] if plan.table.turned else rows


def markdown(plan: TablePlan, results: Findings, command: str, facts: Mapping[str, Any]) -> str:
    """Render the page of a table from `table.md.jinja`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("equilibria.papers", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    missing: dict[str, list[str]] = {}
    for row in plan.table.rows:
        if row.recipe(plan.setting) is None:
            missing.setdefault(row.missing, []).append(row.label)
    return environment.get_template("table.md.jinja").render(
        plan=plan,
        name=base_name(plan),
        command=command,
        facts=facts,
        lines=cells(plan, results),
        missing=missing,
        failures=results.failures,
        drawings={name: label for name, (label, _) in drawings(plan).items()},
    )


def as_data(
    plan: TablePlan, results: Findings, command: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a table: recipes, numbers of every run, means and deviations."""
    table = plan.table
    return {
        "kind": KIND,
        "id": table.id,
        "paper": table.paper,
        "title": table.title,
        "setting": plan.setting,
        "remarks": list(table.remarks(plan.setting)),
        **facts,
        "command": command,
        "seeds": list(plan.seeds),
        "failures": results.failures,
        "rows": [_row_data(plan, results, row) for row in table.rows],
    }


def _ours(measure: str | None, results: Sequence[Result]) -> str:
    values = [] if measure is None else collect(results, measure)
    return measure_of(measure).show(values) if measure is not None and values else EMPTY_CELL


def _costs(results: Sequence[Result]) -> list[str]:
    """Return the number of parameters, CPU minutes and the converged share as text."""
    parameters = collect(results, "parameters")
    minutes = collect(results, "training_minutes")
    shares = collect(results, "share_converged")
    return [
        f"{parameters[0]:,.0f}" if parameters else EMPTY_CELL,
        f"{statistics.fmean(minutes):.2f}" if minutes else EMPTY_CELL,
        f"{statistics.fmean(shares):.1%}" if shares else EMPTY_CELL,
    ]


def _row_data(plan: TablePlan, results: Findings, row: Row) -> dict[str, Any]:
    runs = results.results.get(row.label, {})
    names = dict.fromkeys(n for result in runs.values() for n in result if "@" not in n)
    values = {name: collect(list(runs.values()), name) for name in names}
    return {
        "label": row.label,
        "paper": dict(row.paper),
        "measures": {column.title: row.measure(column) for column in plan.table.columns},
        "missing": row.missing if row.recipe(plan.setting) is None else None,
        "recipe": row.recipe(plan.setting),
        "runs": [
            {"seed": seed, "folder": plan.jobs[row.label, seed].folder.name, **result}
            for seed, result in runs.items()
        ],
        "mean": {name: statistics.fmean(v) for name, v in values.items() if v},
        "deviation": {name: deviation(v) for name, v in values.items() if v},
    }


def write_index(folder: Path) -> str:
    """Return a Markdown table of the recorded tables in a folder, for a page next to it.

    Args:
        folder: Folder with the records.

    Examples:
        >>> from pathlib import Path
        >>> Path("no-results").mkdir()
        >>> from equilibria.papers.report import write_index
        >>> write_index(Path("no-results")).splitlines()[0]  # no further lines
        '| table | what | setting | date | commit | seeds | command |'
    """
    lines = [
        "| table | what | setting | date | commit | seeds | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for path, record in recorded(folder):
        page = f"{folder.name}/{path.stem}.md"
        cells = [
            f"[{record['id']}]({page})",
            f"{record['paper']}: {record['title']}",
            record["setting"],
            record["date"],
            record["commit"] or "",
            ", ".join(map(str, record["seeds"])),
            f"`{record['command']}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def recorded(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the JSON files of recorded tables in a folder, with their content."""
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and record.get("kind") == KIND:
            yield path, record


def redraw(folder: Path) -> list[Path]:
    """Redraw the figure of every recorded table in a folder from its numbers.

    Args:
        folder: Folder with the records.

    Returns:
        The files that were written.

    Examples:
        >>> from pathlib import Path
        >>> Path("nothing-recorded").mkdir()
        >>> from equilibria.papers.report import redraw
        >>> redraw(Path("nothing-recorded"))
        []
    """
    drawn = []
    for path, record in recorded(folder):
        drawn.append(path.with_suffix(".png"))
        write_atomically(drawn[-1], table_png(find_table(record["id"]), record))
    return drawn


def provenance() -> dict[str, Any]:
    """Return date, versions and hardware; names neither the machine nor its folders.

    Examples:
        >>> from equilibria.papers.report import provenance
        >>> "versions" in provenance()
        True
    """
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "versions": {
            "equilibria": equilibria.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
    }


def commit() -> str | None:
    """Return the commit of the checkout that contains the package, with a + if files differ.

    None for an installed package, or if git is not available.
    """
    root = Path(equilibria.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return process.stdout.strip() or None
