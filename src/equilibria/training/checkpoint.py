"""Files that are either the old or the new one, never half of each, and what a run resumes from."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

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
