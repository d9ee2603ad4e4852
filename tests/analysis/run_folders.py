"""Run folders with given metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from equilibria.training.files import sealed_json


def make_run(
    folder: Path, lines: list[dict[str, Any]], recipe: dict[str, dict[str, Any]] | None = None
) -> Path:
    parts: dict[str, dict[str, Any]] = {
        "model": {"name": "opteq-small"},
        "data": {"name": "digits"},
        "training": {"epochs": 9},
    }
    for part, changes in (recipe or {}).items():
        parts[part] |= changes
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(parts))
    entries = [{"epoch": index + 1, **line} for index, line in enumerate(lines)]
    text = "".join(sealed_json(entry, indent=None) + "\n" for entry in entries)
    if text:
        (folder / "metrics.jsonl").write_text(text)
    return folder


def line(loss: float, **others: Any) -> dict[str, Any]:
    return {"loss": loss, "accuracy": 0.5, "mean_iterations": 4.0, "cpu_seconds": 30.0, **others}
