"""A run is a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from equilibria.training.checkpoint import save_weights, write_atomically
from equilibria.training.metrics import EpochMetrics


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `model.safetensors` and `report.html` of one training run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.weights = path / "model.safetensors"
        self.report = path / "report.html"

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """A fresh run in `path`: a new or empty folder, or one whose earlier run it replaces.

        Any other folder is refused, so that a slip in the path overwrites nothing.
        """
        import yaml

        run = cls(path)
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file: name a folder for the run")
        if path.is_dir() and any(path.iterdir()) and not run.config.exists():
            raise FileExistsError(
                f"{path} holds files but no earlier run: name a new or an empty folder"
            )
        path.mkdir(parents=True, exist_ok=True)
        for left_over in (run.metrics, run.weights, run.report):
            left_over.unlink(missing_ok=True)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        write_atomically(run.config, text.encode())
        return run

    def append_metrics(self, metrics: EpochMetrics) -> None:
        """One line an epoch, on disk as soon as the epoch ends."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(metrics), allow_nan=False) + "\n")

    def save_weights(self, model: nn.Module, metadata: Mapping[str, str] | None = None) -> None:
        save_weights(model, self.weights, metadata)

    def write_report(self, html: str) -> None:
        write_atomically(self.report, html.encode())
