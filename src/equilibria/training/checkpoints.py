"""The checkpoints of a run: what it needs to go on as if nothing had happened."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

KEPT = 2
"""How many checkpoints stay: the last one, and one to fall back to."""
WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"


class CheckpointWarning(UserWarning):
    """A file of a run is damaged, and something else was taken or done."""


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


Restore = Callable[[dict[str, Tensor], TrainingState], None]
"""Takes in weights and state, or raises and changes nothing."""


class Checkpoints:
    """A folder an epoch, of which the two that were written last are kept, and the best weights.

    A checkpoint is written under another name and renamed when all of it is on the disk, so that a
    kill at any moment loses the current epoch at the most. Its manifest has the checksums of its
    files, and counts the checkpoints as they are written: after a new start from the first epoch,
    the highest epoch is not the newest.

    metrics: a file for people, a line of JSON an epoch; always made anew from the history.

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
            # In memory first: torch's own writer aborts where a disk is full.
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
        sound = [folder for folder in self.present() if folder not in self._damaged]
        superseded = [*sound[KEPT:], *(self._damaged if len(sound) >= KEPT else ())]
        for old in superseded:
            self._remove(old)

    def save_best(self, model: nn.Module, epoch: int, score: float) -> None:
        """Keep the weights of the best epoch so far."""
        self._make_folder()
        save_weights(model, self.best, {"epoch": str(epoch), "score": repr(score)})

    def present(self) -> list[Path]:
        """The checkpoints there are, the one that was written last first."""
        return sorted(self.folder.glob("epoch-*"), key=lambda f: (_written(f), f), reverse=True)

    def newest_weights(self) -> Path | None:
        """The weights of the newest checkpoint, if there is one."""
        kept = (folder / WEIGHTS for folder in self.present())
        return next((path for path in kept if path.is_file()), None)

    def newest_sound(self) -> tuple[int, Path] | None:
        """The epoch and the weights of the newest checkpoint whose weights are as written, if any.

        The state of the training is not read: the weights do not need it.
        """
        for folder in sorted(self.present(), key=lambda folder: _written(folder) >= 0):
            try:
                weights, files = folder / WEIGHTS, _checksums(folder)
                check_run_file(weights, _run_of(folder))
                check_file_size(weights)
                if checksum_of_file(weights) != files[WEIGHTS]:
                    raise DamagedFileError(_another_checksum(WEIGHTS))
                return int(folder.name.removeprefix("epoch-")), weights
            except Exception as error:
                _pass_over(folder, error)
        return None

    def load(self, restore: Restore) -> TrainingState | None:
        """Restore the newest checkpoint that is sound and fits; None if there is none."""
        # First those whose manifest is damaged: they may be the newest, and shall not go untold.
        for folder in sorted(self.present(), key=lambda folder: _written(folder) >= 0):
            try:
                weights, state = _read(folder)
                restore(weights, state)
            except Exception as error:
                self._damaged.add(folder)
                _pass_over(folder, error)
                continue
            self._write_metrics(state.history)
            return state
        return None

    def _remove(self, old: Path) -> None:
        """By a rename first: a kill leaves no half of a checkpoint under its name."""
        gone = temporary_name(self.folder / "superseded")
        shutil.rmtree(gone, ignore_errors=True)
        if old.exists():
            old.replace(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _make_folder(self) -> None:
        # Not its parents: where the folder of the run was deleted, that must not go unnoticed.
        self.folder.mkdir(exist_ok=True)

    def _write_metrics(self, history: Sequence[Mapping[str, Any]]) -> None:
        if self._metrics is not None:
            lines = [sealed_json(metrics, indent=None) for metrics in history]
            write_atomically(self._metrics, "".join(f"{line}\n" for line in lines).encode())


def _pass_over(folder: Path, error: Exception) -> None:
    warn_caller(
        f"the checkpoint {folder} cannot be read ({error}); trying the one before it",
        CheckpointWarning,
    )


def _read(folder: Path) -> tuple[dict[str, Tensor], TrainingState]:
    for name in (WEIGHTS, STATE):
        check_run_file(folder / name, _run_of(folder))
    for name, expected in _checksums(folder).items():
        if checksum_of_file(folder / name) != expected:
            raise DamagedFileError(_another_checksum(name))
    kept = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return read_weights(folder / WEIGHTS), TrainingState(**kept)


def _another_checksum(name: str) -> str:
    return f"{name} has another checksum than it was written with"


def _run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return folder.parent.parent


def _manifest(folder: Path) -> dict[str, Any]:
    return unsealed(read_run_text(folder / MANIFEST, _run_of(folder)).decode(), MANIFEST)


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of the two files of a checkpoint."""
    files = _manifest(folder)["files"]
    if not isinstance(files, dict) or set(files) != {WEIGHTS, STATE}:
        named = ", ".join(map(repr, files)) if isinstance(files, dict) else repr(files)
        raise DamagedFileError(
            f"{MANIFEST} names {named:.200}, but a checkpoint has {WEIGHTS} and {STATE}"
        )
    return files


def _written(folder: Path) -> int:
    """Return the number of a checkpoint among all that were written; −1 if it is damaged."""
    try:
        return int(_manifest(folder)["written"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
