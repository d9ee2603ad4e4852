"""The files of a run: written whole or not at all, checkpoints to resume from, one folder a run."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from equilibria.training.metrics import EpochMetrics
from equilibria.training.recipe import load_recipe

KEPT = 2
"""How many checkpoints stay: the last one, and one to fall back to."""


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Without this, a crash of the machine may keep the new name and lose the content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    with atomic_writer(path) as file:
        file.write(content)


def json_text(data: Any, *, indent: int = 2) -> str:
    """Data as JSON, dataclasses as objects; it has no NaN and no infinity: these become null."""

    def finite(value: Any) -> Any:
        if is_dataclass(value):
            return {field.name: finite(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(data), indent=indent, allow_nan=False, ensure_ascii=False)


def save_weights(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Parameters and buffers as a safetensors file, which loads without running any code."""
    from safetensors.torch import save

    tensors = {
        name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()
    }
    write_atomically(path, save(tensors, metadata=dict(metadata or {})))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote into a model of the same shape; anything else is an error.

    Weights from before models normalized their images lack mean and std: the model keeps its own.
    """
    from safetensors.torch import load

    own = {n: v for n, v in model.state_dict().items() if n in ("normalize.mean", "normalize.std")}
    model.load_state_dict({**own, **load(path.read_bytes())}, strict=True)


def stored_shapes(path: Path) -> dict[str, torch.Size]:
    """Names and shapes of what `save_weights` wrote, without reading the numbers."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


class CheckpointWarning(UserWarning):
    """A checkpoint could not be read, and an earlier one was taken."""


@dataclass(frozen=True)
class TrainingState:
    """What a run needs besides the weights to go on as if nothing had happened.

    Chance is not in it: every epoch draws it anew from the seed of the run.
    """

    optimizer: dict[str, Any]
    step: int
    history: list[dict[str, Any]]
    starts: list[list[Tensor]]
    """Where warm solves start: for every layer which samples it knows, and their states."""


class Checkpoints:
    """The checkpoints of a run: a folder an epoch, of which the last two are kept, and the best.

    A folder is written under another name and renamed when all of it is on the disk, so that a kill
    at any moment loses the current epoch at the most.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, epoch: int, model: nn.Module, state: TrainingState) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"epoch-{epoch:05d}"
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_weights(model, temporary / "model.safetensors")
        with atomic_writer(temporary / "state.pt") as file:
            torch.save(vars(state), file)
        shutil.rmtree(target, ignore_errors=True)
        temporary.replace(target)
        _sync_folder(self.folder)
        for old in self.present()[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def save_best(self, model: nn.Module, epoch: int, score: float) -> None:
        """Keep the weights of the best epoch so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        metadata = {"epoch": str(epoch), "score": repr(score)}
        save_weights(model, self.best, metadata)

    @property
    def best(self) -> Path:
        return self.folder / "best.safetensors"

    def present(self) -> list[Path]:
        """The checkpoints there are, the newest first."""
        return sorted(self.folder.glob("epoch-*"), reverse=True)

    def newest_weights(self) -> Path | None:
        """The weights of the newest checkpoint, if there is one."""
        kept = (folder / "model.safetensors" for folder in self.present())
        return next((path for path in kept if path.is_file()), None)

    def load(self, model: nn.Module, device: torch.device | str = "cpu") -> TrainingState | None:
        """Load the newest checkpoint that can be read into the model; None if there is none."""
        for folder in self.present():
            try:
                kept = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
                state = TrainingState(**kept)
                load_weights(model, folder / "model.safetensors")
            except Exception as error:
                warnings.warn(
                    f"the checkpoint {folder} cannot be read ({error}); trying the one before it",
                    CheckpointWarning,
                    stacklevel=2,
                )
                continue
            model.to(device)
            return state
        return None


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable, where folders can be synced at all."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    def opened(cls, path: Path, config: Mapping[str, Any], *, resume: bool = False) -> RunFolder:
        """A fresh run in `path`: a new or empty folder, or one whose earlier run it replaces.

        Any other folder is refused, so that a slip in the path overwrites nothing.

        resume: go on with the run in `path`, if there is one, which must be of the same recipe.
        """
        import yaml

        run = cls(path)
        if resume and run.config.exists():
            if load_recipe(run.config).as_data() != config:
                raise ValueError(
                    f"{run.config} is another recipe than the one given: resume with that recipe "
                    f"(equilibria train {run.config} --output {path} --resume), or name a new "
                    "folder"
                )
            return run
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
