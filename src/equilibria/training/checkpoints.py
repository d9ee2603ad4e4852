"""Checkpoints, from which a run resumes with the results of an uninterrupted one."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context.caller import warn_caller
from equilibria.training.files import (
    DamagedFileError,
    check_run_file,
    checksum_of_file,
    read_run_text,
    read_weights,
    save_weights,
    sealed_json,
    sync_folder,
    temporary_name,
    unsealed,
    write_atomically,
)
from equilibria.training.sizes import check_file_size

KEPT_CHECKPOINTS = 2
"""Number of checkpoints that are kept: the last one, and one in case it is damaged."""
WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"


class CheckpointWarning(UserWarning):
    """A file of a run is damaged or missing, and another one is used instead."""


@dataclass(frozen=True)
class TrainingState:
    """State of a run besides the weights.

    It has no random state, because every epoch seeds its generators from the seed of the run.

    Attributes:
        optimizer: State of the optimizer.
        step: Number of steps so far.
        history: Metrics of the epochs so far.
        starts: Warm starts: for each layer, which samples it has solved, and their states.
        trained: Trained parameters, if the weights of the checkpoint are their moving average.
    """

    optimizer: dict[str, Any]
    step: int
    history: list[dict[str, Any]]
    starts: list[list[Tensor]]
    trained: list[Tensor] = field(default_factory=list)


Restore = Callable[[dict[str, Tensor], TrainingState], None]
"""Function that restores weights and state, or raises and changes nothing."""


class Checkpoints:
    """The last two checkpoints of a run, one folder each, and its best weights.

    A checkpoint is written under a temporary name and renamed when it is complete on the disk, so
    that killing the process loses at most the current epoch. Its manifest has the checksums of its
    files and a counter of the checkpoints. After a restart from the first epoch, the newest
    checkpoint is not the one with the highest epoch.

    Args:
        folder: Folder of the checkpoints.
        metrics: File with one line of JSON per epoch, rewritten from the history.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.checkpoints import Checkpoints
        >>> Checkpoints(Path("no-run")).present()
        []
    """

    def __init__(self, folder: Path, metrics: Path | None = None) -> None:
        self.folder = folder
        self.best = folder / "best.safetensors"
        self._metrics = metrics
        self._damaged: set[Path] = set()

    def save(self, epoch: int, model: nn.Module, state: TrainingState) -> None:
        """Save a checkpoint of an epoch, and remove the oldest ones."""
        self._make_folder()
        present = self.present()
        target = self.folder / f"epoch-{epoch:05d}"
        temporary = temporary_name(target)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            save_weights(model, temporary / WEIGHTS)
            # Through memory, because torch's writer aborts the process if the disk is full.
            buffer = io.BytesIO()
            torch.save(vars(state), buffer)
            write_atomically(temporary / STATE, buffer.getvalue())
            manifest = {
                "written": 1 + max(map(_written, present), default=0),
                "files": {f: checksum_of_file(temporary / f) for f in (WEIGHTS, STATE)},
            }
            write_atomically(temporary / MANIFEST, sealed_json(manifest).encode())
            self._remove(target)
            temporary.replace(target)
            sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._damaged.discard(target)
        self._write_metrics(state.history)
        intact = [folder for folder in self.present() if folder not in self._damaged]
        damaged = self._damaged if len(intact) >= KEPT_CHECKPOINTS else ()
        for old in [*intact[KEPT_CHECKPOINTS:], *damaged]:
            self._remove(old)

    def save_best(self, model: nn.Module, epoch: int, score: float) -> None:
        """Keep the weights of the best epoch so far."""
        self._make_folder()
        save_weights(model, self.best, {"epoch": str(epoch), "score": repr(score)})

    def present(self) -> list[Path]:
        """Return the folders of the checkpoints, the newest first."""
        return sorted(self.folder.glob("epoch-*"), key=lambda f: (_written(f), f), reverse=True)

    def newest_weights(self) -> Path | None:
        """Return the weights file of the newest checkpoint, or None."""
        files = (folder / WEIGHTS for folder in self.present())
        return next((path for path in files if path.is_file()), None)

    def newest_intact(self) -> tuple[int, Path] | None:
        """Return the epoch and weights file of the newest checkpoint with intact weights, or None.

        The state of the training is not read.
        """
        for folder in sorted(self.present(), key=lambda folder: _written(folder) >= 0):
            try:
                weights, files = folder / WEIGHTS, _checksums(folder)
                check_run_file(weights, _run_of(folder))
                check_file_size(weights)
                if checksum_of_file(weights) != files[WEIGHTS]:
                    raise DamagedFileError(_wrong_checksum(WEIGHTS))
                return int(folder.name.removeprefix("epoch-")), weights
            except Exception as error:
                _warn_skipped(folder, error)
        return None

    def load(self, restore: Restore) -> TrainingState | None:
        """Restore the newest checkpoint that is intact and fits; return its state, or None."""
        # Those with a damaged manifest come first: the newest one must not be skipped silently.
        for folder in sorted(self.present(), key=lambda folder: _written(folder) >= 0):
            try:
                weights, state = _read(folder)
                restore(weights, state)
            except Exception as error:
                self._damaged.add(folder)
                _warn_skipped(folder, error)
                continue
            self._write_metrics(state.history)
            return state
        return None

    def _remove(self, old: Path) -> None:
        """Rename and then delete, so that no incomplete checkpoint remains under its name."""
        renamed = temporary_name(self.folder / "superseded")
        shutil.rmtree(renamed, ignore_errors=True)
        if old.exists():
            old.replace(renamed)
            shutil.rmtree(renamed, ignore_errors=True)

    def _make_folder(self) -> None:
        # Without parents: if the folder of the run was deleted, this must raise.
        self.folder.mkdir(exist_ok=True)

    def _write_metrics(self, history: Sequence[Mapping[str, Any]]) -> None:
        if self._metrics is not None:
            lines = [sealed_json(metrics, indent=None) for metrics in history]
            write_atomically(self._metrics, "".join(f"{line}\n" for line in lines).encode())


def _warn_skipped(folder: Path, error: Exception) -> None:
    warn_caller(
        f"the checkpoint {folder} cannot be read ({error}); trying the one before it",
        CheckpointWarning,
    )


def _read(folder: Path) -> tuple[dict[str, Tensor], TrainingState]:
    for name in (WEIGHTS, STATE):
        check_run_file(folder / name, _run_of(folder))
    for name, expected in _checksums(folder).items():
        if checksum_of_file(folder / name) != expected:
            raise DamagedFileError(_wrong_checksum(name))
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return read_weights(folder / WEIGHTS), TrainingState(**state)


def _wrong_checksum(name: str) -> str:
    return f"{name} was changed since it was written: its checksum differs"


def _run_of(folder: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return folder.parent.parent


def _manifest(folder: Path) -> dict[str, Any]:
    return unsealed(read_run_text(folder / MANIFEST, _run_of(folder)).decode(), MANIFEST)


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the two files of a checkpoint."""
    files = _manifest(folder)["files"]
    if not isinstance(files, dict) or set(files) != {WEIGHTS, STATE}:
        listed = ", ".join(map(repr, files)) if isinstance(files, dict) else repr(files)
        raise DamagedFileError(
            f"{MANIFEST} lists {listed:.200}, but a checkpoint has {WEIGHTS} and {STATE}"
        )
    return files


def _written(folder: Path) -> int:
    """Return the number of a checkpoint among all that were written; −1 if it is damaged."""
    try:
        return int(_manifest(folder)["written"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
