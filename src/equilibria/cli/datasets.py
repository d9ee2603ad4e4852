"""`equilibria datasets`: list and download data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from typer import Argument

import equilibria as eq
from equilibria.cli.app import DataRoot, JsonList, app, command, examples
from equilibria.cli.console import output_console, print_json, print_table, progress_bar, say

datasets_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.add_typer(datasets_app, name="datasets")


@datasets_app.callback(
    epilog=examples("equilibria datasets", "equilibria datasets get cifar10 --root data")
)
def datasets(context: typer.Context, root: DataRoot = None, as_json: JsonList = False) -> None:
    """List the data sets, their folders, and how to get them."""
    if context.invoked_subcommand is not None:
        return
    base = known_root(root)
    cards = [eq.data.dataset_card(name) for name in eq.data.list_datasets()]
    if as_json:
        print_json([{**vars(card), "here": whereabouts(card, base)} for card in cards])
        return
    rows = [
        (
            card.name,
            card.kind,
            f"{card.classes:,}" if card.classes else "",
            card.size,
            whereabouts(card, base),
            card.license,
            _how_to_get(card),
        )
        for card in cards
    ]
    headings = ("Name", "Kind", "Classes", "Size (train + test)", "Here?", "License")
    print_table((*headings, "How to get it"), rows, right=headings[2:3], unbroken=headings[:3])
    say("Instructions for one data set: equilibria datasets get NAME")
    if base is None:
        say("No folder of data sets is set; use --root FOLDER or set EQUILIBRIA_DATA.")
    else:
        say(f"Folder of data sets: {base}")


@command("get", to=datasets_app)
def get_dataset(
    name: Annotated[str, Argument(help="Name of the data set.")], root: DataRoot = None
) -> None:
    """Download a data set from its publisher, or explain how to get it."""
    columns = (TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn())
    bar = progress_bar(*columns, console=output_console())
    tasks: dict[str, TaskID] = {}

    def report(file: str, received: int, total: int | None) -> None:
        """Show one progress line per file."""
        if file not in tasks:
            tasks[file] = bar.add_task(file, total=total)
        bar.update(tasks[file], completed=received, total=total)

    card = eq.data.dataset_card(name)
    base = eq.data.data_root(root) if card.folders else None
    was_here = base is not None and card.find(base) is not None
    try:
        with bar:
            folder = eq.data.download.download(name, base, progress=report)
    except (eq.data.DownloadError, eq.data.MissingDataError):
        raise
    except OSError as error:
        raise OSError(f"cannot store {name!r}: {error}; give another folder with --root") from None
    if folder is None:
        say(f"{name} needs no files. {card.obtain}")
    else:
        say(f"{name} {'was already' if was_here else 'is now'} in {folder}")


def known_root(root: Path | None) -> Path | None:
    """Return the folder of data sets; None if it is not known."""
    try:
        return eq.data.data_root(root)
    except eq.data.MissingDataError:
        return None


def whereabouts(card: eq.data.DataSetCard, base: Path | None) -> str:
    """Return the folder of a data set below `base`, "always" if it needs no files, or "no"."""
    if card.is_own:
        return "yours"
    if not card.folders:
        return "always"
    folder = card.find(base) if base is not None else None
    return str(folder.relative_to(base)) if folder is not None and base is not None else "no"


def _how_to_get(card: eq.data.DataSetCard) -> str:
    if not card.folders:
        return card.obtain
    return f"equilibria datasets get {card.name}" if card.downloads else card.address
