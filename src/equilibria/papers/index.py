"""A list of what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equilibria.papers.report import KIND


def write_index(folder: Path) -> str:
    """A Markdown table of every recorded table in a folder, for a page beside that folder."""
    lines = [
        "| table | what | setting | date | commit | seeds | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        found = _recorded(path)
        if found is None:
            continue
        page = f"{folder.name}/{path.stem}.md"
        cells = [
            f"[{found['id']}]({page})",
            f"{found['paper']}: {found['title']}",
            found["setting"],
            found["date"],
            found["commit"] or "",
            ", ".join(map(str, found["seeds"])),
            f"`{found['command']}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _recorded(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    is_ours = isinstance(content, dict) and content.get("kind") == KIND
    return content if is_ours else None
