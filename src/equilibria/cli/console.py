"""What the terminal sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from equilibria.training import EpochMetrics, StepProgress


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with one line that says what is wrong and what to do."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        f"[bold red]Error:[/] {_plain(message)}"
    )
    raise typer.Exit(code)


def print_table(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns: what, and how much."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in rows:
        table.add_row(label, value)
    console.print(table)


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


class TrainingDisplay:
    """A progress bar on a terminal; elsewhere one plain line an epoch."""

    def __init__(self, console: Console, epochs: int) -> None:
        self.console = console
        self.epochs = epochs
        self.progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task(f"[dim]epoch[/] 1/{epochs}", total=None)

    @contextmanager
    def running(self) -> Iterator[TrainingDisplay]:
        with self.progress:
            yield self

    def on_step(self, step: StepProgress) -> None:
        self.progress.update(self.task, completed=step.step, total=step.steps)

    def on_epoch(self, metrics: EpochMetrics) -> None:
        facts = epoch_facts(metrics, self.epochs)
        if self.console.is_terminal:
            line = " ".join(f"[dim]{label}[/] {value}" for label, value in facts)
            self.progress.update(self.task, description=line)
        else:
            line = "  ".join(f"{label} {value}" for label, value in facts)
            self.console.print(f"{line}  {metrics.seconds:.1f} s", highlight=False, soft_wrap=True)


def epoch_facts(metrics: EpochMetrics, epochs: int) -> list[tuple[str, str]]:
    """What a line on an epoch says, as (label, value)."""
    facts = [
        ("epoch", f"{metrics.epoch:>{len(str(epochs))}}/{epochs}"),
        ("loss", f"{metrics.loss:.4f}"),
    ]
    if metrics.accuracy is not None:
        facts.append(("accuracy", f"{metrics.accuracy:.1%}"))
    if metrics.validation_accuracy is not None:
        facts.append(("validation", f"{metrics.validation_accuracy:.1%}"))
    elif metrics.validation_score is not None:
        facts.append(("validation", f"{metrics.validation_score:.2f}"))
    if metrics.share_converged is not None:
        facts.append(("converged", f"{metrics.share_converged:.1%}"))
    if metrics.mean_iterations is not None:
        facts.append(("iterations", f"{metrics.mean_iterations:.1f}"))
    return facts


def _plain(text: str) -> str:
    """Text that rich takes as it is, square brackets included."""
    from rich.markup import escape

    return escape(text)
