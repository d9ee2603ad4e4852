"""What the terminal sees."""

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
from equilibria.cli.faults import printable

WIDTH_OF_A_FILE = 200
"""Columns where the output is not a terminal."""
LEAST_WIDTH = 8
"""Of a column in a table, unless its heading is shorter."""


def output_console(*, quiet: bool = False) -> Console:
    """Where results go: as wide as the terminal, or wide enough for a file."""
    console = Console(highlight=False, quiet=quiet)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_FILE
    return console


def say(text: str, *, wrap: bool = False) -> None:
    """A line as it is, square brackets included, however long; `wrap` is for prose."""
    output_console().print(printable(text), markup=False, soft_wrap=not wrap)


def print_json(data: Any) -> None:
    """Data for other programs; a dataclass is an object."""
    print(printable(eq.training.files.json_text(data)))


@contextmanager
def json_list() -> Iterator[Callable[[Any], None]]:
    """Prints a JSON list item by item, as `print_json` would print it whole."""
    begun = False

    def add(item: Any) -> None:
        nonlocal begun
        text = printable(eq.training.files.json_text(item))
        print(",\n" if begun else "[\n", indent(text, "  "), sep="", end="")
        begun = True

    try:
        yield add
    finally:
        print("\n]" if begun else "[]")


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    right: Container[str] = (),
    unbroken: Container[str] = (),
    title: str | None = None,
) -> None:
    """A table without lines, its cells as they are; None among the rows is a rule.

    right: headings of the columns of numbers.
    unbroken: headings of columns that are not wrapped.
    """
    table = Table(
        box=box.SIMPLE, padding=(0, 1, 0, 0), title=title and _cell(title), title_justify="left"
    )
    for heading in headings:
        table.add_column(
            escape(printable(heading)),
            justify="right" if heading in right else "left",
            overflow="fold",
            min_width=min(LEAST_WIDTH, *map(len, heading.split("\n"))),
            no_wrap=heading in unbroken,
        )
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(_cell(cell) for cell in row))
    output_console().print(table)


def _cell(text: str) -> str:
    """The text in one line and as it is, square brackets included."""
    return escape(printable(text).replace("\n", "\\n"))


def print_facts(
    title: str, rows: Sequence[tuple[str, str]], console: Console | None = None
) -> None:
    """Two columns: what, and how much; without the rows that have no value."""
    table = Table(title=_cell(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, value in rows:
        if value:
            table.add_row(_cell(what), _cell(value))
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


def shown(value: Any, form: str = "", unit: str = "") -> str:
    """A cell of a table; empty where there is no value."""
    return "" if value is None else f"{value:{form}}{unit}"
