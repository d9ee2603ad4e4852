"""`equilibria datasets`: what there is to train on, what is here, and how to get the rest."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from equilibria.cli.console import fail
from equilibria.data import (
    DataFileError,
    DataSetCard,
    DownloadError,
    MissingDataError,
    data_root,
    dataset_card,
    download,
    list_datasets,
)

WIDTH_OF_A_FILE = 200
"""Columns where the output is not a terminal."""


def show_datasets(root: Path | None = None) -> None:
    """One line a data set."""
    console = _console()
    try:
        base: Path | None = data_root(root)
    except MissingDataError:
        base = None
    table = Table(box=box.SIMPLE)
    table.add_column("Name", no_wrap=True)
    table.add_column("Kind", no_wrap=True)
    table.add_column("Classes", justify="right", no_wrap=True)
    table.add_column("Size (train + test)")
    table.add_column("Here?", overflow="fold")
    table.add_column("License")
    table.add_column("How to get it", overflow="fold")
    for name in list_datasets():
        card = dataset_card(name)
        table.add_row(
            name,
            card.kind,
            f"{card.classes:,}" if card.classes else "",
            card.size,
            _whereabouts(card, base),
            card.license,
            _short_way(card),
        )
    console.print(table)
    console.print("What to do, step by step: equilibria datasets get NAME")
    if base is None:
        console.print(
            "No folder of data sets is known: set EQUILIBRIA_DATA to it, or name it with --root."
        )
    else:
        console.print(f"Looked for below {base}", markup=False, soft_wrap=True)


def get_dataset(name: str, root: Path | None = None) -> None:
    """Download a data set, with a progress bar on a terminal."""
    console = _console()
    try:
        card = dataset_card(name)
        base = data_root(root) if card.folders else None
        was_here = base is not None and card.find(base) is not None
        with _progress_bar(console) as bar:
            folder = download(name, base, progress=_Reporter(bar).report)
    except (DataFileError, DownloadError, MissingDataError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot store {name!r}: {error}; choose another folder with --root")
    if folder is None:
        console.print(f"{name} needs no files. {card.obtain}", markup=False)
    else:
        verb = "was already" if was_here else "is now"
        console.print(f"{name} {verb} in {folder}", markup=False, soft_wrap=True)


class _Reporter:
    """Shows each file that arrives as a line of its own."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, TaskID] = {}

    def report(self, file: str, here: int, total: int | None) -> None:
        if file not in self.tasks:
            self.tasks[file] = self.bar.add_task(file, total=total)
        self.bar.update(self.tasks[file], completed=here, total=total)


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _whereabouts(card: DataSetCard, base: Path | None) -> str:
    if not card.folders:
        return "always"
    found = card.find(base) if base is not None else None
    return str(found.relative_to(base)) if found is not None and base is not None else "no"


def _short_way(card: DataSetCard) -> str:
    if not card.folders:
        return card.obtain
    return f"equilibria datasets get {card.name}" if card.downloads else card.address


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_OF_A_FILE)
