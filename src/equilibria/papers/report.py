"""A finished table as Markdown, as JSON with all numbers, and as a picture.

Also the list of all recorded tables, with date, versions, and hardware.
"""

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
"""Marks the JSON files that `index` lists."""
NOTHING = "–"


def base_name(made: TablePlan) -> str:
    """Return the stem of the files of a table."""
    return made.table.id if made.setting == "full" else f"{made.table.id}-quick"


def write_report(
    made: TablePlan, found: Findings, output: Path, command: str, facts: Mapping[str, Any]
) -> list[Path]:
    """Write ID.md, ID.json and ID.png (ID-quick.* for a quick run); `facts` are `provenance()`."""
    name = base_name(made)
    record = as_data(made, found, command, facts)
    contents = {
        "md": markdown(made, found, command, facts).encode(),
        "json": (json.dumps(record, indent=1) + "\n").encode(),
        "png": table_png(made.table, record),
    }
    output.mkdir(parents=True, exist_ok=True)
    files = []
    for ending, content in contents.items():
        files.append(output / f"{name}.{ending}")
        write_atomically(files[-1], content)
    for name, (_, source) in drawings(made).items():
        files.append(output / name)
        write_atomically(files[-1], source.read_bytes())
    return files


def drawings(made: TablePlan) -> dict[str, tuple[str, Path]]:
    """By file name: the first row that a picture is of, and where its run has it.

    The name is that of the run, so that rows and tables that share a run share its pictures.
    """
    found: dict[str, tuple[str, Path]] = {}
    for (label, _), job in made.jobs.items():
        for picture_name in job.pictures:
            source = job.picture(picture_name)
            if source.is_file():
                found.setdefault(f"{job.folder.name}-{picture_name}.png", (label, source))
    return found


def cells(made: TablePlan, found: Findings) -> list[list[str]]:
    """The heading and the rows: ours beside the paper's, column by column.

    A column of which the paper prints nothing is ours alone.

    Examples:
        >>> from pathlib import Path
        >>> plan = eq.papers.plan(eq.papers.find_table("opteq-t3"), "quick", [0], Path("tables"))
        >>> from equilibria.papers.report import cells
        >>> from equilibria.papers.runner import findings
        >>> cells(plan, findings(plan, []))[0][:3]
        ['row', 'accuracy (%)', 'paper: Acc.']
    """
    heading = ["row"]
    printed = {title for row in made.table.rows for title in row.paper}  # A figure may print none.
    for column in made.table.columns:
        if column.measure is not None:
            title, at = measure_of(column.measure).title, "@" in column.measure
            own = {row.measure(column) for row in made.table.rows if not row.missing}
            if len(own) > 1:  # Each row measures something else there.
                title, at = column.title, False
            heading.append(f"{title}, {column.title}" if at else title)
        if column.title in printed:
            heading.append(f"paper: {column.title}")
    rows = [[*heading, "parameters", "CPU min", "converged"]]
    for row in made.table.rows:
        results = found.of(row)
        line = [row.label]
        for column in made.table.columns:
            if column.measure is not None:
                line.append(_ours(row.measure(column), results))
            if column.title in printed:
                line.append(row.paper.get(column.title, NOTHING))
        rows.append([*line, *_costs(results)])
    return [list(line) for line in zip(*rows, strict=True)] if made.table.turned else rows


def markdown(made: TablePlan, found: Findings, command: str, facts: Mapping[str, Any]) -> str:
    """The page of a table, which is the template `table.md.jinja`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("equilibria.papers", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    left_out: dict[str, list[str]] = {}
    for row in made.table.rows:
        if row.recipe(made.setting) is None:
            left_out.setdefault(row.missing, []).append(row.label)
    return environment.get_template("table.md.jinja").render(
        made=made,
        name=base_name(made),
        command=command,
        facts=facts,
        lines=cells(made, found),
        left_out=left_out,
        failures=found.failures,
        drawings={name: label for name, (label, _) in drawings(made).items()},
    )


def as_data(
    made: TablePlan, found: Findings, command: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything: recipes, the numbers of every run, means and standard deviations."""
    table = made.table
    return {
        "kind": KIND,
        "id": table.id,
        "paper": table.paper,
        "title": table.title,
        "setting": made.setting,
        "remarks": list(table.remarks(made.setting)),
        **facts,
        "command": command,
        "seeds": list(made.seeds),
        "failures": found.failures,
        "rows": [_row_data(made, found, row) for row in table.rows],
    }


def _ours(measure: str | None, results: Sequence[Result]) -> str:
    values = [] if measure is None else collect(results, measure)
    return measure_of(measure).show(values) if measure is not None and values else NOTHING


def _costs(results: Sequence[Result]) -> list[str]:
    """Parameters, CPU minutes, converged share."""
    parameters = collect(results, "parameters")
    minutes = collect(results, "training_minutes")
    shares = collect(results, "share_converged")
    return [
        f"{parameters[0]:,.0f}" if parameters else NOTHING,
        f"{statistics.fmean(minutes):.2f}" if minutes else NOTHING,
        f"{statistics.fmean(shares):.1%}" if shares else NOTHING,
    ]


def _row_data(made: TablePlan, found: Findings, row: Row) -> dict[str, Any]:
    results = found.results.get(row.label, {})
    names = dict.fromkeys(n for result in results.values() for n in result if "@" not in n)
    values = {name: collect(list(results.values()), name) for name in names}
    return {
        "label": row.label,
        "paper": dict(row.paper),
        "measures": {column.title: row.measure(column) for column in made.table.columns},
        "missing": row.missing if row.recipe(made.setting) is None else None,
        "recipe": row.recipe(made.setting),
        "runs": [
            {"seed": seed, "folder": made.jobs[row.label, seed].folder.name, **result}
            for seed, result in results.items()
        ],
        "mean": {name: statistics.fmean(v) for name, v in values.items() if v},
        "deviation": {name: deviation(v) for name, v in values.items() if v},
    }


def write_index(folder: Path) -> str:
    """A Markdown table of every recorded table in a folder, for a page beside that folder.

    Examples:
        >>> from pathlib import Path
        >>> Path("no-results").mkdir()
        >>> from equilibria.papers.report import write_index
        >>> write_index(Path("no-results")).splitlines()[0]  # and no lines below it
        '| table | what | setting | date | commit | seeds | command |'
    """
    lines = [
        "| table | what | setting | date | commit | seeds | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for path, found in recorded(folder):
        page = f"{folder.name}/{path.stem}.md"
        cells = [
            f"[{found['id']}]({page})",
            f"{found['paper']}: {found['title']}",
            found["setting"],
            found["date"],
            found["commit"] or "",
            ", ".join(map(str, found["seeds"])),
            f"`{found['command']}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def recorded(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of recorded tables in a folder, and what they hold."""
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and found.get("kind") == KIND:
            yield path, found


def redraw(folder: Path) -> list[Path]:
    """Draw the picture of every recorded table in a folder again, from its numbers.

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
    """When, with what and on what results were made; names neither the machine nor its folders.

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
    """The commit of the checkout that the package is in, with a + if files differ from it.

    None for an installed package, and where there is no git.
    """
    root = Path(equilibria.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return answer.stdout.strip() or None
