"""The folder of a run: recognized by a mark of our own, locked while it is written, never lost."""

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
    """A folder that cannot be used as was asked, and why."""


class RunFolder:
    """The files of a training run: recipe, metrics, checkpoints, weights, and what describes it.

    `run.json` marks the folder as ours. It holds the checksum of the recipe, what the images of the
    run are like and a fingerprint of its data.

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
        self._begun_before: dict[Path, bytes] = {}
        self._unlock: Callable[[], object] = lambda: None

    @property
    def _replaced(self) -> Path:
        """Where an earlier run waits until this one has a checkpoint."""
        place = self.path.resolve()
        return place.parent / f".{place.name}.replaced"

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
        """A run in `path`, locked: a new or empty folder, or one that holds a run.

        Any other folder is refused, so that a slip in the path overwrites nothing. Make sure
        before that the recipe can be followed: nothing should be touched for one that cannot.

        facts: of the run's images; those of `facts["data"]` must not have changed on `resume`.
        resume: go on with the run in `path`, if there is one, which must be of the same recipe.
        earlier: what the run has followed until now, if `config` gives it more epochs.
        overwrite: replace the run in `path`. It is put aside, and deleted once the new one has a
            checkpoint; if that fails before, it is put back.
        """
        run = cls(path)
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file: name a folder for the run")
        if run._replaced.is_dir() and not path.exists():
            run._replaced.replace(path)  # A kill came between putting aside and starting anew.
        run._refuse_other_things(resume)
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
            own = (file for file in (run.mark, run.config) if file.is_file())
            run._begun_before = {file: file.read_bytes() for file in own}
        try:
            remove_temporary(path)
            remove_temporary(run.checkpoints)
            if run.holds_work():
                run.settle()
            content, noted = _as_yaml(config), dict(facts or {})
            if resume and run.holds_work():
                run._require_same(config if earlier is None else earlier, noted)
                noted = {**run._kept_facts(), **noted}
            elif run.holds_work():
                if not overwrite:
                    raise RunError(
                        f"{path} holds a run already: --resume (resume=True) goes on with it, "
                        "--overwrite (overwrite=True) replaces it, or name another folder"
                    )
                run._put_aside()
            if earlier is not None:
                # A kill between the two files leaves one that the run has written all the same.
                noted["earlier_config"] = checksum(run.config.read_bytes())
            parts = {p.module: vars(p) for p in (*run._needed_parts(), *plugins.imported())}
            noted |= {"imports": list(parts.values())} if parts else {}
            mark = {"kind": KIND, "config": checksum(content), **noted}
            for file, text in ((run.mark, sealed_json(mark).encode()), (run.config, content)):
                if not file.exists() or file.read_bytes() != text:
                    write_atomically(file, text)
        except BaseException:
            run.abandon()
            raise
        return run

    def _refuse_other_things(self, resume: bool) -> None:
        """Before anything is touched: what is not ours stays as it is."""
        if not self.path.is_dir() or self._is_ours():
            return
        others = [path for path in self.path.iterdir() if not is_temporary(path)]
        # A run whose mark was lost may go on: its recipe will be compared.
        if others and not (resume and self.config.is_file() and self.holds_work()):
            raise FileExistsError(
                f"{self.path} holds files but no earlier run: name a new or an empty folder"
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
        """Whether there is something to lose, or to go on from."""
        kept = Checkpoints(self.checkpoints)
        return self.weights.exists() or kept.best.exists() or bool(kept.present())

    def is_finished(self) -> bool:
        """Whether it has its trained model, and was not given more epochs after that."""
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
                f"another process is training in {self.path}: wait for it, or name another folder"
            ) from None
        if descriptor is not None:
            self._unlock = weakref.finalize(self, release_lock, descriptor, os.getpid())

    def close(self) -> None:
        """Let others write to the folder."""
        self._unlock()
        self._is_open = False

    def _wrote_config(self) -> bool:
        """Whether the recipe is as the run wrote it; True if `run.json` does not say."""
        known = self.facts()
        written = {known.get("config"), known.get("earlier_config")} - {None}
        return not written or checksum(self._read(self.config)) in written

    def _kept_facts(self) -> dict[str, Any]:
        """What a run that goes on has to say of its beginning."""
        known = self.facts()
        return {name: known[name] for name in ("started_from", "earlier_config") if name in known}

    def _require_same(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        known = self.facts()
        if known.get("config") != checksum(_as_yaml(config)):
            self.require_own_config()
            if _without_place(load_recipe(self.config).as_data()) != _without_place(config):
                raise RunError(
                    f"{self.config} is another recipe than the one given: resume with that recipe "
                    f"(equilibria train --output {self.path} --resume), or name a new folder"
                )
        begun, named = known.get("started_from"), facts.get("started_from")
        if named is not None and (begun or {}).get("weights") != named["weights"]:
            raise RunError(
                f"{self.path} was not started from the weights of {named['run']}: leave out --from "
                "(start_from) to go on with it, or name a new folder"
            )
        then, now = known.get("data"), facts.get("data")
        if then is not None and now is not None and then != now:
            differs = f"{then['samples']} samples then, {now['samples']} now"
            if then["samples"] == now["samples"]:
                differs = "as many samples, but other ones"
            raise RunError(
                f"the training data is not what {self.path} was started with ({differs}): bring it "
                "back, or start a new run in another folder"
            )

    def require_own_config(self) -> None:
        """Raise `RunError` if `config.yaml` was changed or damaged since the run wrote it."""
        if not self._wrote_config():
            raise RunError(
                f"{self.config} is not as the run wrote it: resume with the recipe that the "
                "run began with, or start a new one in another folder"
            )

    def _put_aside(self) -> None:
        place = self.path.resolve()  # The path may be a link.
        if place in (Path.cwd(), *Path.cwd().parents):
            raise RunError(f"{self.path} is the present folder: replace the run from outside of it")
        if self._replaced.exists():
            shutil.rmtree(self._replaced)  # The run that is here has replaced it.
        unlock_earlier = self._unlock
        place.replace(self._replaced)
        place.mkdir()
        self._lock()
        unlock_earlier()

    def settle(self) -> None:
        """The run has a checkpoint: what it replaces is not needed any more."""
        shutil.rmtree(self._replaced, ignore_errors=True)

    def abandon(self) -> None:
        """Close the folder; without a checkpoint, leave it as it was before the run was opened.

        A run that was to be replaced comes back, and so does the recipe of an earlier start.
        """
        if not self._is_open:
            return  # Another process writes to it.
        if not self.holds_work():
            if self._made_folder or self._replaced.exists():
                shutil.rmtree(self.path.resolve(), ignore_errors=True)
            elif self._begun_before:
                for file, content in self._begun_before.items():
                    if not file.exists() or file.read_bytes() != content:
                        write_atomically(file, content)
            else:
                for file in (self.mark, self.config):
                    file.unlink(missing_ok=True)
            if self._replaced.exists():
                self._replaced.replace(self.path.resolve())
        self.close()

    def facts(self) -> dict[str, Any]:
        """What the run says of itself in `run.json`; nothing where that is missing or damaged."""
        if not self.mark.is_file():
            return {}
        try:
            return unsealed(self._read(self.mark).decode(), self.mark)
        except ValueError as error:
            warn_caller(str(error), CheckpointWarning)
            return {}

    def _needed_parts(self) -> list[plugins.Parts]:
        """The code of the user's own that the run was trained with."""
        noted = self.facts().get("imports", [])
        return [
            plugins.Parts(item["source"], item["sha256"])
            for item in (noted if isinstance(noted, list) else [])
            if isinstance(item, dict) and {"source", "sha256"} <= item.keys()
        ]

    def require_parts(self) -> None:
        """Refuse to go on if the user has not imported what the run was trained with."""
        plugins.require(self._needed_parts(), f"the run {self.path}")

    def recipe(self) -> Recipe:
        """The recipe of the run; a warning where the file is not as the run wrote it."""
        check_run_file(self.config, self.path)
        recipe = load_recipe(self.config)
        if not self._wrote_config():
            warn_caller(
                f"{self.config} is not as the run wrote it: it was changed, or is damaged",
                CheckpointWarning,
            )
        return recipe

    def read_metrics(self) -> list[dict[str, Any]]:
        """One entry an epoch; a damaged line is told and left out."""
        if not self.metrics.exists():
            return []
        entries = []
        # An empty file is a damaged one: there is none before the first epoch.
        lines = self._read(self.metrics).splitlines() or [b""]
        for number, line in enumerate(lines, 1):
            try:
                name = f"line {number} of {self.metrics}"
                entry = unsealed(line.decode(), name)
                plain = all(isinstance(value, int | float | None) for value in entry.values())
                if not plain or type(entry.get("epoch")) is not int:
                    raise DamagedFileError(f"{name} is damaged: it holds no numbers of an epoch")
                entries.append(entry)
            except ValueError as error:
                warn_caller(
                    f"{error}; it is left out, and --resume writes it anew", CheckpointWarning
                )
        return entries


def _as_yaml(config: Mapping[str, Any]) -> bytes:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode()


def _without_place(config: Mapping[str, Any]) -> dict[str, Any]:
    """What results depend on.

    Data may move: whether it is the same, its fingerprint says. Who reads it, and what is said
    about it all, does not matter.
    """
    data = {**config.get("data", {}), "root": None, "workers": None}
    return {**config, "data": data, "about": ""}
