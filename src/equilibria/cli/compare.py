"""`equilibria compare`: training runs side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from equilibria.cli.console import fail, figure_form
from equilibria.cli.train import as_data
from equilibria.report.compare import (
    ComparedRun,
    comparison_png,
    differing_settings,
    read_runs,
    score_name,
    store_evaluation,
)
from equilibria.training import choose_device, trained, write_atomically

WIDTH_OF_A_FILE = 160
"""Columns where the output is not a terminal."""
WIDTH_OF_LABELS, WIDTH_OF_A_RUN = 32, 20
PICTURE, PAGE = "compare.png", "compare.md"

Row = tuple[str, list[str]]


def run_comparison(
    *, folders: list[Path], output: Path | None, evaluate: bool, device_name: str, as_json: bool
) -> None:
    """Print runs side by side and, into the folder `output`, draw their curves."""
    try:
        runs = read_runs(folders)
        if evaluate:
            _evaluate(runs, device_name)
            runs = read_runs(folders)
        written = [] if output is None else _write(runs, output)
    except (OSError, TypeError, ValueError) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(comparison_data(runs), indent=2, ensure_ascii=False))
        return
    _print_tables(runs)
    for path in written:
        Console(highlight=False).print(f"Written: {path}", markup=False, soft_wrap=True)


def comparison_data(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """An object a run; its `settings` are those in which the recipes differ."""
    differing = differing_settings(runs)
    return [
        {**run.as_data(), "settings": {key: values[at] for key, values in differing.items()}}
        for at, run in enumerate(runs)
    ]


def comparison_table(runs: Sequence[ComparedRun]) -> tuple[list[Row], list[Row]]:
    """Rows of a label and a cell a run: the facts that some run has, and the settings."""
    facts = [run.as_data() for run in runs]
    score = score_name(runs)
    rows = [
        (label.format(score=score), [show(fact) for fact in facts]) for label, show in _FACT_ROWS
    ]
    names = dict.fromkeys(name for fact in facts for name in fact["test_figures"])
    for name in names:
        label, form = figure_form(name)
        values = [fact["test_figures"].get(name) for fact in facts]
        cells = ["" if value is None else format(value, form) for value in values]
        rows.append((f"Test: {label}", cells))
    settings = [
        (key, [_setting(value) for value in values])
        for key, values in differing_settings(runs).items()
    ]
    return [row for row in rows if any(row[1])], settings


def comparison_markdown(runs: Sequence[ComparedRun]) -> str:
    """The table, and the picture of the curves beside it, as a page."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    facts, settings = comparison_table(runs)
    rows = [
        line(["", *(run.name for run in runs)]),
        line(["---", *("---:" for _ in runs)]),
        *(line([label, *cells]) for label, cells in facts),
        *(line([f"`{key}`", *cells]) for key, cells in settings),
    ]
    return "\n".join(["# Runs side by side", "", *rows, "", f"![Curves]({PICTURE})", ""])


def _print_tables(runs: Sequence[ComparedRun]) -> None:
    """As many runs in a table as there is room for."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_OF_A_FILE)
    facts, settings = comparison_table(runs)
    room = max(1, (console.width - WIDTH_OF_LABELS) // WIDTH_OF_A_RUN)
    for start in range(0, len(runs), room):
        some = slice(start, start + room)
        table = Table(box=box.SIMPLE)
        table.add_column("Run", overflow="fold")
        for run in runs[some]:
            table.add_column(escape(run.name), justify="right", overflow="fold")
        for rows in (facts, settings):
            for label, cells in rows:
                table.add_row(escape(label), *(escape(cell) for cell in cells[some]))
            table.add_section()
        console.print(table)


def _evaluate(runs: Sequence[ComparedRun], device_name: str) -> None:
    """Store an evaluation of every finished run that has none."""
    device = choose_device(device_name)
    waiting = Console(stderr=True)
    for run in runs:
        if not run.is_finished or run.evaluation is not None:
            continue
        with waiting.status(f"Evaluating {escape(run.name)} …"):
            experiment = trained(run.folder, device=device)
            store_evaluation(run.folder, as_data(experiment, experiment.evaluate()))


def _write(runs: Sequence[ComparedRun], output: Path) -> list[Path]:
    picture = comparison_png(runs)
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / PICTURE, picture)
    write_atomically(output / PAGE, comparison_markdown(runs).encode())
    return [output / PICTURE, output / PAGE]


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda fact: "" if fact[key] is None else format(fact[key], form)


def _score(key: str) -> Callable[[Mapping[str, Any]], str]:
    """A share in per cent; what is no share, such as a PSNR, as it is."""
    return lambda fact: _number(key, ".2%" if (fact[key] or 0) <= 1 else ".2f")(fact)


def _best(fact: Mapping[str, Any]) -> str:
    score = _score("best_validation_score")(fact)
    return f"{score} (epoch {fact['best_epoch']})" if score else ""


_FACT_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("Model", _number("model", "")),
    ("Parameters", _number("parameters", ",")),
    ("Data", _number("data", "")),
    ("State", _number("state", "")),
    ("Epochs", lambda fact: f"{fact['epochs']}/{fact['epochs_asked']}"),
    ("Training loss", _number("loss", ".4f")),
    ("Training accuracy", _number("accuracy", ".2%")),
    ("Validation {score}, best", _best),
    ("Validation {score}, last", _score("last_validation_score")),
    ("Test accuracy", _number("test_accuracy", ".2%")),
    ("Test mIoU", _number("test_mean_iou", ".2%")),
    ("Iterations, mean", _number("mean_iterations", ".1f")),
    ("Share converged", _number("share_converged", ".1%")),
    ("Seconds", _number("seconds", ",.1f")),
    ("CPU seconds", _number("cpu_seconds", ",.1f")),
)


def _setting(value: Any) -> str:
    """As YAML would write it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
