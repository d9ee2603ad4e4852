"""Extension of the site: lines `name: meaning` in docstrings become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")
CODE = re.compile(r"(`[^`]*`)")
STAR = re.compile(r"(?<=[\w)\]])\*")
"""A star after a symbol, as in z*, which Markdown would read as emphasis."""


class Options(griffe.Extension):
    """Extension of griffe, which mkdocs.yml lists."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_stars(with_lists(obj.docstring.value))


def with_lists(text: str) -> str:
    """Convert each `name: meaning`, with indented continuation lines, to an item of a list."""
    lines: list[str] = []
    follows_item = False
    for line in text.splitlines():
        starts = not lines or not lines[-1].strip() or follows_item
        match = OPTION.match(line) if starts else None
        if match:
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            line = f"- {names}: {line[match.end() :]}"
        follows_item = bool(match) or (follows_item and line.startswith("    "))
        lines.append(line)
    return "\n".join(lines)


def with_stars(text: str) -> str:
    """Escape the stars of formulas outside code."""
    lines = []
    for line in text.splitlines():
        if not line.lstrip().startswith((">>>", "...")):
            pieces = CODE.split(line)
            pieces[::2] = (STAR.sub(r"\\*", piece) for piece in pieces[::2])
            line = "".join(pieces)
        lines.append(line)
    return "\n".join(lines)
