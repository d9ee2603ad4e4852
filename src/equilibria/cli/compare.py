"""`equilibria compare`: compare training runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape as escape_html
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

import equilibria as eq
from equilibria.cli.app import DataRoot, JsonList, command
from equilibria.cli.console import (
    output_console,
    print_json,
    print_table,
    say,
    shown,
)
from equilibria.cli.evaluate import as_data
from equilibria.cli.faults import writable_folder
from equilibria.registry import printable

if TYPE_CHECKING:
    from equilibria.analysis.compare import ComparedRun

LABEL_WIDTH, RUN_WIDTH = 32, 20
"""Widths of the columns of a table, in characters."""
PICTURE, PAGE = "compare.png", "compare.md"

Row = tuple[str, list[str]]


@command(
    "compare",
    "equilibria compare runs/opteq runs/short",
    "equilibria compare runs/* --evaluate --output comparison",
)
def compare(
    runs: Annotated[list[Path], Argument(help="Folders of runs, finished or not.")],
    output: Annotated[
        Path | None,
        Option(help="Folder for compare.png (curves) and compare.md.", callback=writable_folder),
    ] = None,
    evaluate: Annotated[
        bool,
        Option(
            "--evaluate", help="Evaluate finished runs on their test images, and store the result."
        ),
    ] = False,
    root: DataRoot = None,
    as_json: JsonList = False,
    device: Annotated[str, Option(help="Device for --evaluate: auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Compare training runs and list the settings that differ."""
    from equilibria.analysis.compare import differing_settings, read_runs
    from equilibria.report.compare import comparison_png

    compared = read_runs(runs)
    if evaluate:
        _evaluate(compared, device, root)
        compared = read_runs(runs)
    if output is not None:
        picture = comparison_png(compared)
        output.mkdir(parents=True, exist_ok=True)
        eq.training.files.write_atomically(output / PICTURE, picture)
        eq.training.files.write_atomically(output / PAGE, _markdown(compared).encode())
    if as_json:
        data = [run.as_data() for run in compared]
        differing = differing_settings(compared)
        for index, run in enumerate(data):
            run["settings"] = {key: values[index] for key, values in differing.items()}
        print_json(data)
        return
    _print_tables(compared)
    if output is not None:
        say(f"Written: {output / PICTURE}")
        say(f"Written: {output / PAGE}")


def _rows(runs: Sequence[ComparedRun]) -> tuple[list[Row], list[Row]]:
    """Return the rows of facts and of differing settings: a label, and one cell per run."""
    from equilibria.analysis.compare import differing_settings, score_name

    score = score_name(runs)
    facts = [_facts(run.as_data(), score) for run in runs]
    labels = dict.fromkeys(label for fact in facts for label in fact)
    rows = [(label, [fact.get(label, "") for fact in facts]) for label in labels]
    settings = [
        (key, [_setting(value) for value in values])
        for key, values in differing_settings(runs).items()
    ]
    return [row for row in rows if any(row[1])], settings


def _facts(run: Mapping[str, Any], score: str) -> dict[str, str]:
    """Return the facts of a run by label; unknown ones are empty."""

    def number(key: str, form: str) -> str:
        return shown(run[key], form)

    def share(key: str) -> str:
        """Format as percent; values above 1, such as a PSNR, as plain numbers."""
        return number(key, ".2%" if (run[key] or 0) <= 1 else ".2f")

    best = share("best_validation_score")
    facts = {
        "Model": run["model"],
        "Parameters": number("parameters", ","),
        "Data": run["data"],
        "State": run["state"],
        "Epochs": f"{run['epochs']}/{run['epochs_asked']}",
        "Training loss": number("loss", ".4f"),
        "Training accuracy": number("accuracy", ".2%"),
        f"Validation {score}, best": f"{best} (epoch {run['best_epoch']})" if best else "",
        f"Validation {score}, last": share("last_validation_score"),
        "Test accuracy": number("test_accuracy", ".2%"),
        "Test mIoU": number("test_mean_iou", ".2%"),
        "Iterations, mean": number("mean_iterations", ".1f"),
        "Share converged": number("share_converged", ".1%"),
        "Seconds": number("seconds", ",.1f"),
        "CPU seconds": number("cpu_seconds", ",.1f"),
    }
    figures = eq.report.labels.figure_rows(run["test_figures"])
    return facts | {f"Test: {label}": value for label, value in figures}


def _markdown(runs: Sequence[ComparedRun]) -> str:
    """Return a Markdown page with the table and the picture of the curves."""

    def line(cells: Sequence[str]) -> str:
        # Names can contain markup.
        safe = (escape_html(printable(cell), quote=False) for cell in cells)
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in safe) + " |"

    facts, settings = _rows(runs)
    rows = [
        line(["", *(run.name for run in runs)]),
        line(["---", *("---:" for _ in runs)]),
        *(line([label, *cells]) for label, cells in facts),
        *(line([f"`{key}`", *cells]) for key, cells in settings),
    ]
    return "\n".join(["# Comparison of runs", "", *rows, "", f"![Curves]({PICTURE})", ""])


def _print_tables(runs: Sequence[ComparedRun]) -> None:
    """Print tables with as many runs as fit into the width of the terminal."""
    facts, settings = _rows(runs)
    room = max(1, (output_console().width - LABEL_WIDTH) // RUN_WIDTH)
    for start in range(0, len(runs), room):
        columns = slice(start, start + room)
        names = [run.name for run in runs[columns]]
        above = [(label, *cells[columns]) for label, cells in facts]
        below = [(label, *cells[columns]) for label, cells in settings]
        print_table(("Run", *names), [*above, None, *below], right=names)


def _evaluate(runs: Sequence[ComparedRun], device_name: str, root: Path | None) -> None:
    """Evaluate finished runs without a stored evaluation, and store the results."""
    from equilibria.analysis.compare import store_evaluation

    device = eq.training.processes.choose_device(device_name)
    console = Console(stderr=True)
    for run in runs:
        if not run.is_finished or run.evaluation is not None:
            continue
        with console.status(f"Evaluating {escape(printable(run.name))} …"):
            experiment = eq.training.experiment.trained(run.folder, device=device, root=root)
            store_evaluation(run.folder, as_data(experiment, experiment.evaluate()))


def _setting(value: Any) -> str:
    """Format a setting as YAML."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
