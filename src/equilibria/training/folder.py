"""Folder of a training run, which is locked while it is written and replaced only when safe."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from equilibria import plugins
from equilibria.context.caller import warn_caller
from equilibria.training.checkpoints import Checkpoints, CheckpointWarning
from equilibria.training.files import (
    DamagedFileError,
    check_run_file,
    checksum,
    is_temporary,
    read_run_text,
    release_lock,
    remove_temporary,
    sealed_json,
    take_lock,
    unsealed,
    write_atomically,
)
from equilibria.training.recipe import Recipe, load_recipe

KIND = "equilibria run"


class RunError(ValueError):
    """The folder of a run cannot be used as requested."""


class RunFolder:
    """Files of a training run: recipe, metrics, checkpoints and weights.

    `run.json` marks a folder as a run. It has the checksum of the recipe, a description of the
    images and a fingerprint of the data.

    Args:
        path: The folder.

    Examples:
        >>> from pathlib import Path
        >>> few = ["data.options.train_samples=64", "training.epochs=1"]
        >>> model = eq.train("digits-opteq", *few, output="runs/folder")
        >>> run = eq.training.RunFolder(Path("runs/folder"))
        >>> run.is_finished(), len(run.read_metrics())
        (True, 1)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = path / "run.json"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.weights = path / "model.safetensors"
        self.latents = path / "latents.safetensors"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.evaluation = path / "evaluation.json"
        self.robustness = path / "robustness.json"
        self.tensorboard = path / "tensorboard"
        self._is_open = self._made_folder = False
        self._previous_files: dict[Path, bytes] = {}
        self._unlock: Callable[[], object] = lambda: None

    @property
    def _replaced(self) -> Path:
        """Folder of the replaced run, which is kept until this one has a checkpoint."""
        folder = self.path.resolve()
        return folder.parent / f".{folder.name}.replaced"

    @classmethod
    def opened(
        cls,
        path: Path,
        config: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        earlier: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Open and lock a run in a new or empty folder, or in one that holds a run.

        Other folders are rejected, so that a mistake in the path overwrites nothing. Check the
        recipe before, because this changes files.

        Args:
            path: Folder of the run.
            config: The resolved recipe.
            facts: Facts for `run.json`. On `resume`, `facts["data"]` must not have changed.
            resume: Continue the run in `path`, if there is one; its recipe must be the same.
            overwrite: Replace the run in `path`. It is set aside, and deleted once the new run has
                a checkpoint, or restored if the new run fails before.
            earlier: Recipe of the run so far, if `config` gives it more epochs.

        Returns:
            The locked folder.

        Raises:
            RunError: If the run cannot be continued, or exists and is not to be replaced.
            FileExistsError: If `path` is a file, or a folder with other files.
        """
        run = cls(path)
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file: choose a folder for the run")
        if run._replaced.is_dir() and not path.exists():
            run._replaced.replace(path)  # The process was killed in `_set_aside`.
        run._reject_other_files(resume)
        run._made_folder = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        try:
            run._lock()
        except BaseException:
            if run._made_folder:
                path.rmdir()
            raise
        run._is_open = True
        if run._is_ours():
            existing = (file for file in (run.mark, run.config) if file.is_file())
            run._previous_files = {file: file.read_bytes() for file in existing}
        try:
            remove_temporary(path)
            remove_temporary(run.checkpoints)
            if run.holds_work():
                run.settle()
            content, new_facts = _as_yaml(config), dict(facts or {})
            if resume and run.holds_work():
                run._require_same(config if earlier is None else earlier, new_facts)
                new_facts = {**run._kept_facts(), **new_facts}
            elif run.holds_work():
                if not overwrite:
                    raise RunError(
                        f"{path} already holds a run: continue it with --resume (resume=True), "
                        "replace it with --overwrite (overwrite=True), or choose another folder"
                    )
                run._set_aside()
            if earlier is not None:
                # If the process is killed between the two files, the old recipe is still valid.
                new_facts["earlier_config"] = checksum(run.config.read_bytes())
            parts = {p.module: vars(p) for p in (*run._needed_parts(), *plugins.imported())}
            new_facts |= {"imports": list(parts.values())} if parts else {}
            mark = {"kind": KIND, "config": checksum(content), **new_facts}
            for file, text in ((run.mark, sealed_json(mark).encode()), (run.config, content)):
                if not file.exists() or file.read_bytes() != text:
                    write_atomically(file, text)
        except BaseException:
            run.abandon()
            raise
        return run

    def _reject_other_files(self, resume: bool) -> None:
        """Raise if the folder holds files that are not those of a run."""
        if not self.path.is_dir() or self._is_ours():
            return
        others = [path for path in self.path.iterdir() if not is_temporary(path)]
        # A run that has lost `run.json` may continue, because its recipe is compared.
        if others and not (resume and self.config.is_file() and self.holds_work()):
            raise FileExistsError(
                f"{self.path} holds files that are not a run: choose a new or an empty folder"
            )

    def _read(self, file: Path) -> bytes:
        return read_run_text(file, self.path)

    def _is_ours(self) -> bool:
        try:
            return unsealed(self._read(self.mark).decode(), "").get("kind") == KIND
        except (OSError, ValueError):
            return False

    def is_run(self) -> bool:
        """Whether a run was started in the folder, even if no checkpoint was written."""
        return self.config.is_file() and (self._is_ours() or self.holds_work())

    def holds_work(self) -> bool:
        """Whether the run has weights or a checkpoint."""
        checkpoints = Checkpoints(self.checkpoints)
        return self.weights.exists() or checkpoints.best.exists() or bool(checkpoints.present())

    def is_finished(self) -> bool:
        """Whether the run has trained for all its epochs."""
        newest = next(iter(Checkpoints(self.checkpoints).present()), None)
        epoch = "" if newest is None else newest.name.rpartition("-")[2]
        if not (self.weights.is_file() and epoch.isdecimal() and self._wrote_config()):
            return self.weights.is_file()
        return int(epoch) >= load_recipe(self.config).training.epochs

    def _lock(self) -> None:
        try:
            descriptor = take_lock(self.path)
        except BlockingIOError:
            raise RunError(
                f"another process is training in {self.path}: wait for it, or choose another folder"
            ) from None
        if descriptor is not None:
            self._unlock = weakref.finalize(self, release_lock, descriptor, os.getpid())

    def close(self) -> None:
        """Release the lock of the folder."""
        self._unlock()
        self._is_open = False

    def _wrote_config(self) -> bool:
        """Whether the recipe is as the run wrote it; True if `run.json` has no checksum."""
        facts = self.facts()
        written = {facts.get("config"), facts.get("earlier_config")} - {None}
        return not written or checksum(self._read(self.config)) in written

    def _kept_facts(self) -> dict[str, Any]:
        """Return the facts that do not change when a run continues."""
        facts = self.facts()
        return {name: facts[name] for name in ("started_from", "earlier_config") if name in facts}

    def _require_same(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        previous = self.facts()
        if previous.get("config") != checksum(_as_yaml(config)):
            self.require_own_config()
            if _for_comparison(load_recipe(self.config).as_data()) != _for_comparison(config):
                raise RunError(
                    f"{self.config} differs from the given recipe: resume with the recipe of the "
                    f"run (equilibria train --output {self.path} --resume), or choose a new folder"
                )
        origin, requested = previous.get("started_from"), facts.get("started_from")
        if requested is not None and (origin or {}).get("weights") != requested["weights"]:
            raise RunError(
                f"{self.path} was not started from the weights of {requested['run']}: remove "
                "--from (start_from) to continue it, or choose a new folder"
            )
        then, now = previous.get("data"), facts.get("data")
        if then is not None and now is not None and then != now:
            change = f"{then['samples']} samples then, {now['samples']} now"
            if then["samples"] == now["samples"]:
                change = "the same number of samples, but other ones"
            raise RunError(
                f"the training data has changed since {self.path} was started ({change}): restore "
                "it, or start a new run in another folder"
            )

    def require_own_config(self) -> None:
        """Raise `RunError` if `config.yaml` was changed or damaged since the run wrote it."""
        if not self._wrote_config():
            raise RunError(
                f"{self.config} was changed or damaged since the run wrote it: resume with the "
                "original recipe, or start a new run in another folder"
            )

    def _set_aside(self) -> None:
        folder = self.path.resolve()  # The path may be a link.
        if folder in (Path.cwd(), *Path.cwd().parents):
            raise RunError(
                f"{self.path} is the current folder or contains it: change to another folder "
                "before you replace the run"
            )
        if self._replaced.exists():
            shutil.rmtree(self._replaced)  # The present run has already replaced this one.
        unlock_earlier = self._unlock
        folder.replace(self._replaced)
        folder.mkdir()
        self._lock()
        unlock_earlier()

    def settle(self) -> None:
        """Delete the replaced run, after this run has written a checkpoint."""
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Close the folder; without a checkpoint, restore it as it was before it was opened.

        This restores a run that was to be replaced, and the recipe of an earlier start.
        """
        if not self._is_open:
            return  # Another process may write to the folder.
        if not self.holds_work():
            if self._made_folder or self._replaced.exists():
                shutil.rmtree(self.path.resolve(), ignore_errors=True)
            elif self._previous_files:
                for file, content in self._previous_files.items():
                    if not file.exists() or file.read_bytes() != content:
                        write_atomically(file, content)
            else:
                for file in (self.mark, self.config):
                    file.unlink(missing_ok=True)
            if self._replaced.exists():
                self._replaced.replace(self.path.resolve())
        self.close()

    def facts(self) -> dict[str, Any]:
        """Return the content of `run.json`; empty if the file is missing or damaged."""
        if not self.mark.is_file():
            return {}
        try:
            return unsealed(self._read(self.mark).decode(), self.mark)
        except ValueError as error:
            warn_caller(str(error), CheckpointWarning)
            return {}

    def _needed_parts(self) -> list[plugins.Parts]:
        """Return the custom code that the run was trained with."""
        imports = self.facts().get("imports", [])
        return [
            plugins.Parts(item["source"], item["sha256"])
            for item in (imports if isinstance(imports, list) else [])
            if isinstance(item, dict) and {"source", "sha256"} <= item.keys()
        ]

    def require_parts(self) -> None:
        """Raise if custom code that the run was trained with has not been imported."""
        plugins.require(self._needed_parts(), f"the run {self.path}")

    def recipe(self) -> Recipe:
        """Return the recipe of the run; warn if its file was changed since the run wrote it."""
        check_run_file(self.config, self.path)
        recipe = load_recipe(self.config)
        if not self._wrote_config():
            warn_caller(
                f"{self.config} was changed or damaged since the run wrote it",
                CheckpointWarning,
            )
        return recipe

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return one entry per epoch; damaged lines are skipped with a warning."""
        if not self.metrics.exists():
            return []
        entries = []
        # The file is created with the first epoch, so that an empty file is damaged.
        lines = self._read(self.metrics).splitlines() or [b""]
        for number, line in enumerate(lines, 1):
            try:
                name = f"line {number} of {self.metrics}"
                entry = unsealed(line.decode(), name)
                plain = all(isinstance(value, int | float | None) for value in entry.values())
                if not plain or type(entry.get("epoch")) is not int:
                    raise DamagedFileError(f"{name} is damaged: it does not hold epoch metrics")
                entries.append(entry)
            except ValueError as error:
                warn_caller(f"{error}; it is skipped, and --resume rewrites it", CheckpointWarning)
        return entries


def _as_yaml(config: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode()


def _for_comparison(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a recipe that affects results.

    The folder of the data may change, because the fingerprint identifies the data.
    """
    data = {**config.get("data", {}), "root": None, "workers": None}
    return {**config, "data": data, "about": ""}
