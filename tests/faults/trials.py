"""A training whose every access to its folder is an event, at which it is killed or refused.

As a program: forks children from a process that has imported everything, and prints a JSON object
of what came of them. A fresh interpreter for each would take most of the time.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import equilibria as eq
from equilibria.data import DataSet, DataSetCard, load_digits, register_dataset
from equilibria.training import Recipe, RunFolder
from equilibria.training.checkpoints import Checkpoints, TrainingState
from equilibria.training.files import read_weights
from equilibria.training.recipe import recipe_from_data

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


def exit_code(work: Callable[[], None]) -> int:
    """0, 1 for an error that the program tells in a sentence, and 3 for another."""
    try:
        work()
    except (OSError, ValueError) as error:
        return 1 if str(error) and "\n" not in str(error) else 3
    except Exception:
        return 3
    return 0


def in_child(work: Callable[[], None]) -> int:
    """The exit code of a forked process that does this."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = exit_code(work)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def left_by_kills(folder: Path, **options: Any) -> tuple[int, list[Path]]:
    """How many events a training has, and what is in its place when it is killed at one of them.

    A kill leaves what is on the disk at that moment: a copy is the same, and costs no training.
    Where an event follows another that changed nothing, one of them is enough.
    """
    kept = folder.parent.with_name("left by kills")

    def work() -> None:
        before: dict[str, bytes] = {}
        count = 0

        def at_event(kind: str) -> None:
            nonlocal before, count
            if kind != "open":
                count += 1
                now = content(folder.parent)
                if now != before or count == 1:
                    shutil.copytree(folder.parent, kept / f"{count:04}")
                    before = now

        folder.parent.mkdir(exist_ok=True)
        watch(folder.parent, at_event)
        train(folder, **options)
        (kept / "events").write_text(str(count))

    assert in_child(work) == 0
    shutil.rmtree(folder.parent)
    return int((kept / "events").read_text()), sorted(kept.glob("0*"))


def content(folder: Path) -> dict[str, bytes]:
    """All that there is below a folder, by name; whichever process a temporary file is of."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\.\d+\.tmp$", ".tmp", str(path.relative_to(folder)))
        found[name] = path.read_bytes() if path.is_file() else b"a folder"
    return found


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
    wrong = {}
    folder = place / "killed" / "run"
    events, left = left_by_kills(folder, epochs=epochs)
    for state in left:
        shutil.copytree(state, folder.parent)
        again = exit_code(lambda: train(folder, epochs=epochs, resume=True))
        found = outcome(folder) if again == 0 else {"exit": again}
        differing = [key for key in whole if found.get(key) != whole[key]]
        beside = [path.name for path in folder.parent.iterdir() if path != folder]
        if differing or beside:
            wrong[state.name] = [differing, beside]
        shutil.rmtree(folder.parent)
    return {"events": events, "states": len(left), "wrong": wrong}


def replaced(place: Path) -> dict[str, Any]:
    """Killed at every event of a run that replaces another: one of the two is always whole."""
    folder = place / "one" / "run"
    train(folder)
    earlier = outcome(folder)
    train(place / "other" / "run", seed=1)
    whole = outcome(place / "other" / "run")
    events, left = left_by_kills(folder, seed=1, overwrite=True)
    wrong, gone = {}, 0
    for state in left:
        shutil.copytree(state, folder.parent)
        aside = folder.parent / ".run.replaced"
        if not any(is_whole(path, earlier) for path in (folder, aside)):
            # It has gone; then the new run has a checkpoint to go on from.
            gone += 1
            resumed = exit_code(lambda: train(folder, seed=1, resume=True))
            if resumed != 0 or outcome(folder) != whole:
                wrong[state.name] = resumed
        shutil.rmtree(folder.parent)
        if gone == 5:
            break  # From then on it is a run like others.
    return {"events": events, "states": len(left), "gone": gone, "wrong": wrong}


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
    resumed: dict[str, tuple[int, list[str]]] = {}
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
            # Many leave the same, and from the same the same comes.
            left = repr(content(folder.parent))
            if left not in resumed:
                again = exit_code(lambda: train(folder, resume=True))
                found = outcome(folder) if again == 0 else {}
                resumed[left] = again, [key for key in whole if found.get(key) != whole[key]]
            again, differing = resumed[left]
            if code != 1 or differing:
                wrong[f"{errno.errorcode[fault]} {number}"] = [code, again, differing]
            shutil.rmtree(folder.parent)
        events += number - 1
    return {"events": events, "states": len(resumed), "wrong": wrong}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A kill loses nothing that was written; only a crash of the machine would.
    os.fsync = lambda descriptor: None
    # What a training writes then depends on nothing but its recipe.
    time.perf_counter = time.process_time = lambda: 0.0
    prepare()
    trials = {"kills": kills, "replaced": replaced, "refusals": refusals}
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(trials[sys.argv[1]](Path(temporary).resolve())))
