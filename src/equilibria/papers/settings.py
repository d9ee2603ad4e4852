"""Every setting of a table's recipes beside what the paper says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from equilibria.papers.table import PaperTable, Row
from equilibria.training import recipe_from_data

SILENT = "the paper is silent"
UNREAD = "not noted here"
"""Nobody has written down what the paper says, if anything: this is no claim that it is silent."""
SUBJECT = ("model.name", "data.name", "task.name", "task.options.method")
"""What table and row are about."""
UNRELATED = ("about", "threads", "data.root", "data.workers", "data.in_memory", "training.seed")
"""What changes nothing about a result, or is a seed."""


@dataclass(frozen=True)
class SettingLine:
    """One setting of some rows: a key of their recipe, or what only the paper names."""

    name: str
    paper: str
    ours: str
    why: str
    agrees: bool | None
    """None where the paper says nothing, or nothing of it is noted."""
    rows: tuple[str, ...]


def compared_settings(table: PaperTable) -> list[SettingLine]:
    """The full setting of a table, key by key; rows that have the same in common are one line."""
    lines: dict[tuple[str, str, str, str, bool | None], list[str]] = {}
    for row in table.rows:
        for line in _of_row(row):
            lines.setdefault(line, []).append(row.label)
    return [SettingLine(*line, tuple(rows)) for line, rows in lines.items()]


def _of_row(row: Row) -> Iterator[tuple[str, str, str, str, bool | None]]:
    if row.full is None:
        return
    ours = dict(_leaves(recipe_from_data(row.full).as_data()))
    for name in [*ours, *(name for name in row.settings if name not in ours)]:
        said = row.settings.get(name)
        value = _shown(ours[name]) if name in ours else "–"
        if name in SUBJECT:
            yield name, "as the row says", value, "", None
            continue
        if said is None or said.paper is None:
            yield name, UNREAD if said is None else SILENT, value, "", None
            continue
        source = f" ({said.source})" if said.source else ""
        agrees = name in ours and ours[name] == said.paper
        why = "" if agrees else said.why
        yield name, f"{_shown(said.paper)}{source}", value, why, agrees


def _leaves(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, and what they hold; lists are one value."""
    for key, value in data.items():
        name = f"{place}.{key}".lstrip(".")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, name)
        elif name not in UNRELATED and value not in (None, {}, (), []):
            yield name, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
