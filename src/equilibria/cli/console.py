"""What the terminal sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from equilibria.training import EpochMetrics, StepProgress, json_text

WIDTH_OF_A_FILE = 200
"""Columns where the output is not a terminal."""


def output_console(*, quiet: bool = False) -> Console:
    """Where results go: as wide as the terminal, or wide enough for a file."""
    console = Console(highlight=False, quiet=quiet)
    if not console.is_terminal:
        console = Console(highlight=False, quiet=quiet, width=WIDTH_OF_A_FILE)
    return console


def print_line(text: str) -> None:
    """A line as it is, square brackets included, however long."""
    output_console().print(text, markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Data for other programs; a dataclass is an object."""
    print(json_text(data))


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with one line that says what is wrong and what to do."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]Error:[/] {escape(message)}"
    )
    raise typer.Exit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user can mend ends the program with a line, not with a traceback."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        fail(str(error))


def table_of(
    left: Sequence[str] = (), right: Sequence[str] = (), *, title: str | None = None
) -> Table:
    """A table without lines; the columns of numbers, aligned to the right, come last."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def print_facts(
    title: str, rows: Sequence[tuple[str, str]], console: Console | None = None
) -> None:
    """Two columns: what, and how much."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    (console or output_console()).print(table)


def progress_bar(
    *columns: ProgressColumn, console: Console | None = None, silent: bool = False
) -> Progress:
    """A bar on a terminal only; on stderr, where it leaves no trace, unless a console is given."""
    shown_on = Console(stderr=True) if console is None else console
    return Progress(
        BarColumn(bar_width=20),
        *(columns or (TextColumn("{task.description}"), TimeRemainingColumn(compact=True))),
        console=shown_on,
        transient=console is None,
        disable=silent or not shown_on.is_terminal,
    )


FIGURES: dict[str, tuple[str, str]] = {
    "accuracy": ("Accuracy", ".2%"),
    "top5_accuracy": ("Top-5 accuracy", ".2%"),
    "mean_iou": ("mIoU", ".2%"),
    "mean_accuracy": ("mAcc", ".2%"),
    "robust_accuracy": ("Robust accuracy", ".2%"),
    "interval": ("95 % interval, ±", ".2%"),
    "psnr": ("PSNR, mean (dB)", ".2f"),
    "median_psnr": ("PSNR, median (dB)", ".2f"),
    "measured_psnr": ("PSNR of what was measured, median (dB)", ".2f"),
}
"""How the measures of an evaluation are called and printed; others by their own name."""


def figure_form(name: str) -> tuple[str, str]:
    """What a measure is called, and the format of its value."""
    return FIGURES.get(name, (name.replace("_", " ").capitalize(), ".4g"))


def figure_rows(
    figures: Mapping[str, float | None], *, correct: int | None = None, of: int = 0
) -> list[tuple[str, str]]:
    """The measures that are there, as (label, value); the accuracy with its counts."""
    rows = []
    for name, value in figures.items():
        if value is None:
            continue
        label, form = figure_form(name)
        counts = f" ({correct} of {of})" if name == "accuracy" and correct is not None else ""
        rows.append((label, f"{value:{form}}{counts}"))
    return rows


def fact_rows(facts: Iterable[tuple[str, Any, str]]) -> list[tuple[str, str]]:
    """Of (label, value, format), those that have a value, as (label, value)."""
    return [(label, format(value, form)) for label, value, form in facts if value is not None]


def shown(value: Any, form: str = "", unit: str = "") -> str:
    """A cell of a table; empty where there is no value."""
    return "" if value is None else f"{value:{form}}{unit}"


class TrainingDisplay:
    """A progress bar on a terminal; elsewhere one plain line an epoch."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self.progress = progress_bar(console=console)
        self.task = self.progress.add_task(f"[dim]epoch[/] 1/{epochs}", total=None)

    def on_step(self, step: StepProgress) -> None:
        self.progress.update(self.task, completed=step.step, total=step.steps)

    def on_epoch(self, metrics: EpochMetrics) -> None:
        facts = self._facts(metrics)
        if self.console.is_terminal:
            line = " ".join(f"[dim]{label}[/] {value}" for label, value in facts)
            self.progress.update(self.task, description=line)
        else:
            line = "  ".join(f"{label} {value}" for label, value in facts)
            self.console.print(f"{line}  {metrics.seconds:.1f} s", highlight=False, soft_wrap=True)

    def _facts(self, metrics: EpochMetrics) -> list[tuple[str, str]]:
        """What a line on an epoch says, as (label, value)."""
        score, form = metrics.validation_accuracy, ".1%"
        if score is None:
            score, form = metrics.validation_score, ".2f"
        return fact_rows(
            [
                ("epoch", f"{metrics.epoch:>{len(str(self.epochs))}}/{self.epochs}", ""),
                ("loss", metrics.loss, ".4f"),
                ("accuracy", metrics.accuracy, ".1%"),
                ("validation", score, form),
                ("converged", metrics.share_converged, ".1%"),
                ("iterations", metrics.mean_iterations, ".1f"),
            ]
        )
