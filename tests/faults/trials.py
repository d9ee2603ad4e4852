"""A training whose every access to its folder is an event, at which it is killed or refused.

As a program: forks children from a process that has imported everything, one for each event, and
prints a JSON object of what came of them. A fresh interpreter for each would take most of the time.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import equilibria as eq
from equilibria.data import DataSet, DataSetCard, load_digits, register_dataset
from equilibria.training import Checkpoints, Recipe, RunFolder, recipe_from_data
from equilibria.training.checkpoints import TrainingState
from equilibria.training.files import read_weights

MAKES = {"os.mkdir", "half a write", "os.fsync"}
CHANGES = MAKES | {"os.rename", "os.remove", "os.rmdir"}
FAULTS: dict[int, set[str]] = {
    errno.ENOSPC: MAKES | {"open to write"},
    errno.EROFS: CHANGES | {"open to write"},
    errno.EMFILE: {"open to write", "open"},
}
"""What a full disk, a read-only one and the limit of open files refuse."""


def prepare() -> None:
    digits = load_digits().train
    small = digits.subset(torch.arange(24))
    data = DataSet("few-digits", small, small, tuple("0123456789"))
    register_dataset(DataSetCard("few-digits"), lambda: data, replace=True)


def recipe(seed: int, epochs: int) -> Recipe:
    return recipe_from_data(
        {
            "model": {"name": "opteq-small", "options": {"channels": 2, "width": 2, "pool": 4}},
            "data": {"name": "few-digits", "validation": 0.25},
            "training": {
                "epochs": epochs,
                "batch_size": 10,
                "tolerance": 0.1,
                "gradient": "one_step",
                "seed": seed,
            },
        }
    )


def train(folder: Path, *, seed: int = 0, epochs: int = 2, **options: Any) -> None:
    eq.train(recipe(seed, epochs), output=folder, device="cpu", **options)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without the times, which differ from run to run."""
    run, states = RunFolder(folder), []
    kept = Checkpoints(run.checkpoints)

    def take(weights: dict[str, torch.Tensor], state: TrainingState) -> None:
        states.append((weights, vars(state)))

    kept.load(take)
    found = {
        "weights": read_weights(run.weights),
        "best": read_weights(kept.best),
        "metrics": run.read_metrics(),
        "state": states,
        "facts": run.facts(),
        "recipe": run.recipe().as_data(),
        "left over": [path.name for path in folder.rglob("*.tmp")],
    }
    return plain(found)


def plain(value: Any) -> Any:
    """Something to compare: tensors as numbers, without times."""
    if isinstance(value, dict):
        items = value.items()
        return {str(k): plain(v) for k, v in items if k not in ("seconds", "cpu_seconds")}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return value


def watch(folder: Path, at_event: Callable[[str], None]) -> None:
    """Call `at_event` with the kind of everything that is done to files below a folder."""
    place = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if str(path).startswith(place):
                writes = flags & (os.O_WRONLY | os.O_RDWR)
                at_event("open to write" if writes else "open")
        elif event in CHANGES and (
            str(arguments[0]).startswith(place) or arguments[-1] != -1  # relative to a folder
        ):
            at_event(event)

    sys.addaudithook(hook)
    open_file, fsync = pathlib.Path.open, os.fsync

    def watched_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = open_file(path, mode, *arguments, **options)
        if mode != "wb" or not str(path).startswith(place):
            return file
        write = file.write

        def in_two_parts(content: bytes) -> int:
            half = write(content[: len(content) // 2])
            file.flush()
            at_event("half a write")
            return half + write(content[half:])

        class Watched:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> Any:
                return in_two_parts if name == "write" else getattr(file, name)

        return Watched()

    def watched_fsync(descriptor: int) -> None:
        at_event("os.fsync")
        fsync(descriptor)

    pathlib.Path.open = watched_open  # type: ignore[method-assign,assignment]
    os.fsync = watched_fsync


def in_child(work: Callable[[], None]) -> int:
    """The status of a forked process that does this: minus a signal, or an exit code."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            work()
            code = 0
        except (OSError, ValueError) as error:
            # What the program tells in a sentence.
            code = 1 if str(error) and "\n" not in str(error) else 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number: int, folder: Path, **options: Any) -> int:
    def work() -> None:
        count = 0

        def at_event(kind: str) -> None:
            nonlocal count
            count += kind != "open"
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        watch(folder.parent, at_event)
        train(folder, **options)

    return in_child(work)


def refused_from(number: int, fault: int, folder: Path) -> int:
    """From an event on, all of the kind are refused."""

    def work() -> None:
        count = 0

        def at_event(kind: str) -> None:
            nonlocal count
            if kind in FAULTS[fault]:
                count += 1
                if count >= number:
                    raise OSError(fault, os.strerror(fault))

        watch(folder.parent, at_event)
        train(folder)

    return in_child(work)


def kills(place: Path) -> dict[str, Any]:
    """Killed at every event, then resumed: what differs from a run that nobody killed."""
    epochs = 3  # Two checkpoints are kept: the third epoch deletes one.
    train(place / "whole" / "run", epochs=epochs)
    whole = outcome(place / "whole" / "run")
    wrong, number = {}, 0
    folder = place / "killed" / "run"
    while True:
        number += 1
        code = killed_at(number, folder, epochs=epochs)
        if code == 0:
            return {"events": number - 1, "wrong": wrong}
        again = in_child(lambda: train(folder, epochs=epochs, resume=True))
        found = outcome(folder) if again == 0 else {"exit": again}
        differing = [key for key in whole if found.get(key) != whole[key]]
        beside = [path.name for path in folder.parent.iterdir() if path != folder]
        if code != -signal.SIGKILL or differing or beside:
            wrong[number] = [code, differing, beside]
        shutil.rmtree(folder.parent)


def replaced(place: Path) -> dict[str, Any]:
    """Killed at every event of a run that replaces another: one of the two is always whole."""
    folder = place / "one" / "run"
    train(folder)
    earlier = outcome(folder)
    train(place / "other" / "run", seed=1)
    whole = outcome(place / "other" / "run")
    shutil.copytree(place / "one", place / "kept")
    wrong, number, gone = {}, 0, 0
    while gone < 5:  # From then on it is a run like others.
        number += 1
        code = killed_at(number, folder, seed=1, overwrite=True)
        aside = folder.parent / ".run.replaced"
        if not any(is_whole(path, earlier) for path in (folder, aside)):
            # It has gone; then the new run has a checkpoint to go on from.
            gone += 1
            resumed = in_child(lambda: train(folder, seed=1, resume=True))
            if resumed != 0 or outcome(folder) != whole:
                wrong[number] = [code, resumed]
        shutil.rmtree(place / "one")
        shutil.copytree(place / "kept", place / "one")
    return {"events": number, "wrong": wrong}


def is_whole(folder: Path, expected: dict[str, Any]) -> bool:
    try:
        return outcome(folder) == expected
    except OSError:
        return False


def refusals(place: Path) -> dict[str, Any]:
    """Refused from every event on, in one way after the other; then the fault is gone."""
    train(place / "whole" / "run")
    whole = outcome(place / "whole" / "run")
    wrong: dict[str, Any] = {}
    events = 0
    folder = place / "refused" / "run"
    for fault in FAULTS:
        number = 0
        while True:
            number += 1
            folder.parent.mkdir()
            code = refused_from(number, fault, folder)
            if code == 0 and outcome(folder) == whole:
                # Either the end, or a fault of something that is not needed.
                shutil.rmtree(folder.parent)
                break
            again = in_child(lambda: train(folder, resume=True))
            found = outcome(folder) if again == 0 else {}
            differing = [key for key in whole if found.get(key) != whole[key]]
            if code != 1 or differing:
                wrong[f"{errno.errorcode[fault]} {number}"] = [code, again, differing]
            shutil.rmtree(folder.parent)
        events += number - 1
    return {"events": events, "wrong": wrong}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A kill loses nothing that was written; only a crash of the machine would.
    os.fsync = lambda descriptor: None
    prepare()
    trials = {"kills": kills, "replaced": replaced, "refusals": refusals}
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(trials[sys.argv[1]](Path(temporary).resolve())))
