"""CSV as every command writes it: text that no spreadsheet calculates and no terminal obeys."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from equilibria.cli.faults import printable

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\n", "\r")
"""A spreadsheet takes a cell that begins with one of these for a formula (OWASP's list)."""


def csv_rows(file: TextIO) -> Callable[[Iterable[Any]], object]:
    """Return a function that writes one row of cells to an open file.

    Text gets an apostrophe in front where it would be a formula, and its control characters become
    visible, as in JSON. Numbers stay as they are.
    """
    writer = csv.writer(file, lineterminator="\n")
    return lambda cells: writer.writerow(map(safe_cell, cells))


def safe_cell(value: Any) -> Any:
    """The value of a CSV cell; names of files and classes may hold anything."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if value.lstrip(" ").startswith(FORMULA_STARTS) else text
