"""CSV output, safe to open in spreadsheets and to print on terminals."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from equilibria.registry import printable

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\n", "\r")
"""Spreadsheets evaluate cells that start with one of these (OWASP's list)."""


def csv_rows(file: TextIO) -> Callable[[Iterable[Any]], object]:
    """Return a function that writes one row of cells to an open file.

    Text that would be a formula is prefixed with an apostrophe, and control characters are escaped
    as in JSON. Numbers are unchanged.
    """
    writer = csv.writer(file, lineterminator="\n")
    return lambda cells: writer.writerow(map(safe_cell, cells))


def safe_cell(value: Any) -> Any:
    """Return a safe value of a cell: names of files and classes can contain anything."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if value.lstrip(" ").startswith(FORMULA_STARTS) else text
