"""Output to the terminal: text, tables, JSON, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import indent
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import equilibria as eq
from equilibria.registry import printable

FILE_WIDTH = 200
"""Width of output that is not a terminal, in characters."""
MIN_COLUMN_WIDTH = 8
"""Smallest width of a column of a table, unless its heading is shorter."""


def output_console(*, quiet: bool = False) -> Console:
    """Return the console for results, as wide as the terminal, or `FILE_WIDTH`."""
    console = Console(highlight=False, quiet=quiet)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def say(text: str, *, wrap: bool = False) -> None:
    """Print a line without markup; `wrap` wraps prose at the width of the terminal."""
    output_console().print(printable(text), markup=False, soft_wrap=not wrap)


def print_json(data: Any) -> None:
    """Print data as JSON; a dataclass is an object."""
    print(printable(eq.training.files.json_text(data)))


@contextmanager
def json_list() -> Iterator[Callable[[Any], None]]:
    """Yield a function that prints the items of a JSON list one by one."""
    has_items = False

    def add(item: Any) -> None:
        nonlocal has_items
        text = printable(eq.training.files.json_text(item))
        print(",\n" if has_items else "[\n", indent(text, "  "), sep="", end="")
        has_items = True

    try:
        yield add
    finally:
        print("\n]" if has_items else "[]")


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    right: Container[str] = (),
    unbroken: Container[str] = (),
    title: str | None = None,
) -> None:
    """Print a table.

    Args:
        headings: Headings of the columns.
        rows: Cells of each row, without markup; None is a horizontal line.
        right: Headings of right-aligned columns, for numbers.
        unbroken: Headings of columns that are not wrapped.
        title: Title above the table.
    """
    table = Table(
        box=box.SIMPLE, padding=(0, 1, 0, 0), title=title and _cell(title), title_justify="left"
    )
    for heading in headings:
        table.add_column(
            escape(printable(heading)),
            justify="right" if heading in right else "left",
            overflow="fold",
            min_width=min(MIN_COLUMN_WIDTH, *map(len, heading.split("\n"))),
            no_wrap=heading in unbroken,
        )
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(_cell(cell) for cell in row))
    output_console().print(table)


def _cell(text: str) -> str:
    """Return a text in one line, with markup escaped."""
    return escape(printable(text).replace("\n", "\\n"))


def print_facts(
    title: str, rows: Sequence[tuple[str, str]], console: Console | None = None
) -> None:
    """Print rows of (label, value) as a table, without rows whose value is empty."""
    table = Table(title=_cell(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in rows:
        if value:
            table.add_row(_cell(label), _cell(value))
    (console or output_console()).print(table)


def progress_bar(
    *columns: ProgressColumn, console: Console | None = None, silent: bool = False
) -> Progress:
    """Return a progress bar, which is shown on terminals only.

    By default it is on stderr and disappears when it ends.
    """
    target = Console(stderr=True) if console is None else console
    return Progress(
        BarColumn(bar_width=20),
        *(columns or (TextColumn("{task.description}"), TimeRemainingColumn(compact=True))),
        console=target,
        transient=console is None,
        disable=silent or not target.is_terminal,
    )


def shown(value: Any, form: str = "", unit: str = "") -> str:
    """Format a value for a cell of a table; None becomes an empty text."""
    return "" if value is None else f"{value:{form}}{unit}"
