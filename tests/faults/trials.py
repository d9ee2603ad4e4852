"""Training runs that are killed, or whose file accesses fail, at every access to their folder.

Run as a program, this forks children from a process that has imported everything, which is faster
than new interpreters, and prints the results as a JSON object.
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
"""Events that fail with a full disk, a read-only disk, and too many open files."""


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
    """Return all results of a run except times."""
    run, states = RunFolder(folder), []
    kept = Checkpoints(run.checkpoints)

    def take(weights: dict[str, torch.Tensor], state: TrainingState) -> None:
        states.append((weights, vars(state)))

    kept.load(take)
    results = {
        "weights": read_weights(run.weights),
        "best": read_weights(kept.best),
        "metrics": run.read_metrics(),
        "state": states,
        "facts": run.facts(),
        "recipe": run.recipe().as_data(),
        "left over": [path.name for path in folder.rglob("*.tmp")],
    }
    return plain(results)


def plain(value: Any) -> Any:
    """Convert a value for comparison: tensors to lists, without times."""
    if isinstance(value, dict):
        items = value.items()
        return {str(k): plain(v) for k, v in items if k not in ("seconds", "cpu_seconds")}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return value


def watch(folder: Path, at_event: Callable[[str], None]) -> None:
    """Call `at_event` with the kind of every access to files below a folder."""
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
    """Return 0, or 1 after an error with a one-line message, or 3 after another error."""
    try:
        work()
    except (OSError, ValueError) as error:
        return 1 if str(error) and "\n" not in str(error) else 3
    except Exception:
        return 3
    return 0


def in_child(work: Callable[[], None]) -> int:
    """Run a function in a forked process and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = exit_code(work)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def states_after_kills(folder: Path, **options: Any) -> tuple[int, list[Path]]:
    """Return the number of events of a training, and copies of its folder at the events.

    A copy is what a kill at that moment leaves. Equal consecutive states are copied once.
    """
    kept = folder.parent.with_name("states after kills")

    def work() -> None:
        previous: dict[str, bytes] = {}
        count = 0

        def at_event(kind: str) -> None:
            nonlocal previous, count
            if kind != "open":
                count += 1
                current = content(folder.parent)
                if current != previous or count == 1:
                    shutil.copytree(folder.parent, kept / f"{count:04}")
                    previous = current

        folder.parent.mkdir(exist_ok=True)
        watch(folder.parent, at_event)
        train(folder, **options)
        (kept / "events").write_text(str(count))

    assert in_child(work) == 0
    shutil.rmtree(folder.parent)
    return int((kept / "events").read_text()), sorted(kept.glob("0*"))


def content(folder: Path) -> dict[str, bytes]:
    """Return all content below a folder by name, without process ids of temporary files."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"\.\d+\.tmp$", ".tmp", str(path.relative_to(folder)))
        files[name] = path.read_bytes() if path.is_file() else b"a folder"
    return files


def train_with_fault(number: int, fault: int, folder: Path) -> int:
    """Train while all accesses of a kind fail from event `number` on; return the exit code."""

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
    """Kill at every event, then resume; compare with an uninterrupted run."""
    epochs = 3  # The third epoch deletes a checkpoint, because two are kept.
    train(place / "whole" / "run", epochs=epochs)
    whole = outcome(place / "whole" / "run")
    wrong = {}
    folder = place / "killed" / "run"
    events, states = states_after_kills(folder, epochs=epochs)
    for state in states:
        shutil.copytree(state, folder.parent)
        code = exit_code(lambda: train(folder, epochs=epochs, resume=True))
        results = outcome(folder) if code == 0 else {"exit": code}
        differing = [key for key in whole if results.get(key) != whole[key]]
        leftovers = [path.name for path in folder.parent.iterdir() if path != folder]
        if differing or leftovers:
            wrong[state.name] = [differing, leftovers]
        shutil.rmtree(folder.parent)
    return {"events": events, "states": len(states), "wrong": wrong}


def replaced(place: Path) -> dict[str, Any]:
    """Kill at every event of a run that replaces another; one of the two must be intact."""
    folder = place / "one" / "run"
    train(folder)
    earlier = outcome(folder)
    train(place / "other" / "run", seed=1)
    whole = outcome(place / "other" / "run")
    events, states = states_after_kills(folder, seed=1, overwrite=True)
    wrong, gone = {}, 0
    for state in states:
        shutil.copytree(state, folder.parent)
        aside = folder.parent / ".run.replaced"
        if not any(is_whole(path, earlier) for path in (folder, aside)):
            # The old run is gone, so the new one must have a checkpoint to resume from.
            gone += 1
            resumed = exit_code(lambda: train(folder, seed=1, resume=True))
            if resumed != 0 or outcome(folder) != whole:
                wrong[state.name] = resumed
        shutil.rmtree(folder.parent)
        if gone == 5:
            break  # From here on, it is an ordinary run.
    return {"events": events, "states": len(states), "gone": gone, "wrong": wrong}


def is_whole(folder: Path, expected: dict[str, Any]) -> bool:
    try:
        return outcome(folder) == expected
    except OSError:
        return False


def refusals(place: Path) -> dict[str, Any]:
    """Let all accesses fail from every event on, for each fault; then resume without it."""
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
            code = train_with_fault(number, fault, folder)
            if code == 0 and outcome(folder) == whole:
                # There is no such event, or the fault did not matter.
                shutil.rmtree(folder.parent)
                break
            # Many faults leave the same state, which is resumed only once.
            state = repr(content(folder.parent))
            if state not in resumed:
                resumed_code = exit_code(lambda: train(folder, resume=True))
                results = outcome(folder) if resumed_code == 0 else {}
                differing = [key for key in whole if results.get(key) != whole[key]]
                resumed[state] = resumed_code, differing
            resumed_code, differing = resumed[state]
            if code != 1 or differing:
                wrong[f"{errno.errorcode[fault]} {number}"] = [code, resumed_code, differing]
            shutil.rmtree(folder.parent)
        events += number - 1
    return {"events": events, "states": len(resumed), "wrong": wrong}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A kill does not lose written data, so fsync is not needed.
    os.fsync = lambda descriptor: None
    # Without times, the files depend only on the recipe.
    time.perf_counter = time.process_time = lambda: 0.0
    prepare()
    trials = {"kills": kills, "replaced": replaced, "refusals": refusals}
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(trials[sys.argv[1]](Path(temporary).resolve())))
