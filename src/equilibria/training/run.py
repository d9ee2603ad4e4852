"""A run is a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from equilibria.training.checkpoint import save_weights, write_atomically
from equilibria.training.metrics import EpochMetrics


class RunFolder:
    """The files of a training run: recipe, metrics, checkpoints, weights, and what describes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.weights = path / "model.safetensors"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.evaluation = path / "evaluation.json"
        self.tensorboard = path / "tensorboard"

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
        for left_over in (run.metrics, run.weights, run.report, run.evaluation):
            left_over.unlink(missing_ok=True)
        for folder in (run.checkpoints, run.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        write_atomically(run.config, text.encode())
        return run

    def read_metrics(self) -> list[dict[str, Any]]:
        """One entry an epoch; a last line that a kill cut short is left out."""
        if not self.metrics.exists():
            return []
        entries = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return entries

    def append_metrics(self, metrics: EpochMetrics) -> None:
        """One line an epoch, on disk as soon as the epoch ends.

        Lines of this epoch and later ones, which an interrupted run may have left, are replaced.
        """
        earlier = [line for line in self.read_metrics() if line["epoch"] < metrics.epoch]
        lines = [json.dumps(line, allow_nan=False) for line in [*earlier, asdict(metrics)]]
        write_atomically(self.metrics, ("\n".join(lines) + "\n").encode())

    def save_weights(self, model: nn.Module, metadata: Mapping[str, str] | None = None) -> None:
        save_weights(model, self.weights, metadata)

    def write_report(self, html: str) -> None:
        write_atomically(self.report, html.encode())
