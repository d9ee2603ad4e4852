"""Options in docstrings, a line each with what they mean, are a list on the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")
CODE = re.compile(r"(`[^`]*`)")
STAR = re.compile(r"(?<=[\w)\]])\*")
"""The optimum z*, which Markdown would take for the beginning of an emphasis."""


class Options(griffe.Extension):
    """Found by the site's settings, which name this file."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_stars(with_lists(obj.docstring.value))


def with_lists(text: str) -> str:
    """Each `name: what it means`, whose further lines are indented, as an item of a list."""
    lines: list[str] = []
    follows_item = False
    for line in text.splitlines():
        starts = not lines or not lines[-1].strip() or follows_item
        found = OPTION.match(line) if starts else None
        if found:
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            line = f"- {names}: {line[found.end() :]}"
        follows_item = bool(found) or (follows_item and line.startswith("    "))
        lines.append(line)
    return "\n".join(lines)


def with_stars(text: str) -> str:
    """Stars of formulas as stars, but for code."""
    lines = []
    for line in text.splitlines():
        if not line.lstrip().startswith((">>>", "...")):
            pieces = CODE.split(line)
            pieces[::2] = (STAR.sub(r"\\*", piece) for piece in pieces[::2])
            line = "".join(pieces)
        lines.append(line)
    return "\n".join(lines)
