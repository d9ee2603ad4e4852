"""Randomly damaged run folders and recipes give an error message or the correct output.

`EQUILIBRIA_DAMAGED=1000` runs 1,000 cases; the default takes about a minute on one core.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from equilibria.registry import printable
from tests.program import invoke

CASES = int(os.environ.get("EQUILIBRIA_DAMAGED", "160"))
PARTS = 4
MAX_CPU_SECONDS = 10 if "EQUILIBRIA_DAMAGED" in os.environ else 60
"""CPU seconds after which a command counts as hanging, generous for slow machines."""
RECIPE = (
    *("digits-opteq", "data.options.train_samples=60", "data.validation=0.2"),
    *("model.options.channels=4", "model.options.width=4", "training.epochs=2"),
)
SHORT = ("data.options.train_samples=60", "training.epochs=1", "model.options.channels=4")
"""Overrides that keep training short if a damaged recipe is still valid."""
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 1e308, math.nan, math.inf, 10**30, "", "abc", "\x1b[31m", "own"),
    *([], {}, [[[1]]], {"a": {"b": [None]}}, {"name": "opteq-small"}, ["digits"]),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, a recipe and an image."""
    folder = tmp_path_factory.mktemp("whole")
    result = invoke("train", *RECIPE, "--output", folder / "run")
    assert result.exit_code == 0, result.output
    shutil.copy(folder / "run" / "config.yaml", folder / "recipe.yaml")
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "digit.png")
    return folder


COMMANDS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "runs": lambda folder: ("runs", folder),
    "compare": lambda folder: ("compare", folder / "run", "--json"),
    "evaluate": lambda folder: ("evaluate", folder / "run", "--json"),
    "best": lambda folder: ("evaluate", folder / "run", "--best", "--json"),
    "predict": lambda folder: ("predict", folder / "run", folder / "digit.png", "--json"),
    "recipes": lambda folder: ("recipes", folder / "recipe.yaml"),
    "train": lambda folder: ("train", folder / "recipe.yaml", *SHORT, "--output", folder / "new"),
    "resume": lambda folder: (
        *("train", folder / "run" / "config.yaml", "--output", folder / "run", "--resume"),
    ),
}

READ = {
    "runs": ("config.yaml", "metrics.jsonl", "run.json"),
    "compare": ("config.yaml", "metrics.jsonl", "evaluation.json", "model.safetensors"),
    "evaluate": ("config.yaml", "model.safetensors", "run.json"),
    "best": ("config.yaml", "best.safetensors", "run.json"),
    "predict": ("config.yaml", "model.safetensors", "run.json"),
}
"""Names of the files that a command reads."""


def flip(content: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 30]) if damaged else 0):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def cut(content: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return chance.choice([content[:end], content[start:], content[:start] + content[end:]])


def swap(content: bytes, chance: random.Random) -> bytes:
    first, second, third = sorted(chance.randrange(len(content) + 1) for _ in range(3))
    head, tail = content[:first], content[third:]
    return head + content[second:third] + content[first:second] + tail


def replace(content: bytes, chance: random.Random) -> bytes:
    return chance.choice([b"", b"\x00" * len(content), chance.randbytes(200), b"[" * 3000, b"{}"])


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return all pairs of a container and one of its keys."""
    if not isinstance(data, dict | list):
        return []
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    return [(data, key) for key in keys] + [p for key in keys for p in places(data[key])]


def change(data: Any, chance: random.Random) -> Any:
    """Remove, rename or add a key, or replace a value by one of another type."""
    candidates = places(data)
    if not candidates:
        return chance.choice(JUNK)
    for _ in range(chance.choice([1, 1, 2, 4])):
        container, key = chance.choice(candidates)
        how = chance.randrange(4)
        if how == 0 and isinstance(container, dict):
            container.pop(key, None)
        elif how == 1 and isinstance(container, dict):
            container[chance.choice(["x", 3, "options", "name", "seed"])] = container.pop(key, 0)
        elif isinstance(container, dict) or key < len(container):
            container[key] = chance.choice(JUNK)
    return data


def rewrite(file: Path, chance: random.Random) -> None:
    """Keep the file well-formed, but change keys and values."""
    if file.suffix == ".yaml":
        file.write_text(yaml.safe_dump(change(yaml.safe_load(file.read_text()), chance)))
    elif file.suffix in (".json", ".jsonl"):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        at = chance.randrange(len(lines))
        lines[at] = json.dumps(change(json.loads(lines[at]), chance))
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_bytes(flip(file.read_bytes(), chance))


class Touch:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def attack(file: Path, mark: Path) -> None:
    """Replace a file by one that runs code when it is loaded without checks."""
    if file.suffix in (".yaml", ".json", ".jsonl"):
        file.write_text(f"model: !!python/object/apply:os.mkdir ['{mark}']\n")
    else:
        file.write_bytes(pickle.dumps(Touch(mark)))


def damage(folder: Path, command: str, chance: random.Random, mark: Path) -> str:
    """Damage a file that the command reads, and return a description."""
    wants_recipe = command in ("recipes", "train")
    below = sorted(path for path in (folder / "run").rglob("*") if path.is_file())
    # Mostly files that the command reads, sometimes any file.
    read = [path for path in below if path.name in READ.get(command, ())] * (chance.random() < 0.8)
    file = folder / "recipe.yaml" if wants_recipe else chance.choice(read or below)
    how = chance.choice(["flip", "cut", "swap", "replace", "rewrite", "rewrite", "other", "attack"])
    if how == "attack":
        attack(file, mark)
    elif how == "rewrite":
        rewrite(file, chance)
    elif how == "other":
        file.unlink()
        kind = chance.randrange(4)
        if kind == 0:
            file.mkdir()
        elif kind == 1:
            file.symlink_to(file.name)
        elif kind == 2 and not wants_recipe:
            shutil.copy(chance.choice([path for path in below if path != file]), file)
    else:
        function = {"flip": flip, "cut": cut, "swap": swap, "replace": replace}[how]
        file.write_bytes(function(file.read_bytes(), chance))
    return f"{command}: {how} of {file.relative_to(folder)}"


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Limit the CPU time, because the machine may be busy, and the wall-clock time generously."""

    def stop(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} CPU seconds")

    previous = [signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(60 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        signal.signal(signal.SIGPROF, previous[0])
        signal.signal(signal.SIGALRM, previous[1])


def answer(command: str, folder: Path) -> tuple[Any, str, int, list[str]]:
    """Run a command; return its stdout, stderr, exit code, and warnings."""
    with warnings.catch_warnings(record=True) as caught, limit(MAX_CPU_SECONDS):
        warnings.simplefilter("always")
        result = invoke(*COMMANDS[command](folder))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    output = result.stdout.replace(str(folder), "FOLDER")
    return output, result.stderr, result.exit_code, [str(warning.message) for warning in caught]


def close(actual: Any, expected: Any) -> bool:
    """Whether two JSON objects are equal except for times."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            close(actual[key], value) for key, value in expected.items() if "seconds" not in key
        )
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(close, actual, expected))
    return bool(actual == expected)


def shown_text(file: Path) -> str:
    return file.read_text(encoding="utf-8").rstrip("\n")


def check(command: str, folder: Path, expected: str, *, is_whole: bool) -> None:
    """Run a command on a damaged folder and check its output.

    Args:
        command: Name of the command.
        folder: The damaged folder.
        expected: Output for the undamaged folder.
        is_whole: Whether no file is missing. With fewer files, another output may be correct.
    """
    output, error, code, warned = answer(command, folder)
    if code != 0:
        assert error.strip(), "it failed without a message"
        return
    if warned or not is_whole:
        return
    if command == "recipes":
        assert output.rstrip("\n") == printable(shown_text(folder / "recipe.yaml"))
    elif command in ("train", "resume"):
        run = folder / ("new" if command == "train" else "run")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert lines
        assert all(math.isfinite(line["loss"]) for line in lines)
    elif command == "runs":
        # The width of the columns depends on the name of the folder.
        words = [[w for w in text.split() if not w.startswith("─")] for text in (output, expected)]
        assert words[0] == words[1], "another output without a warning"
    else:
        assert close(json.loads(output), json.loads(expected)), "another output without a warning"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_folders_and_recipes_give_an_error_or_the_correct_output(
    part: int, whole: Path, tmp_path: Path
) -> None:
    expected = {name: answer(name, whole) for name in COMMANDS if name not in ("train", "resume")}
    assert all(code == 0 for _, _, code, _ in expected.values())
    mark = tmp_path / "code-was-run"
    failures = []
    for case in range(part, CASES, PARTS):
        chance = random.Random(case)
        command = chance.choice(list(COMMANDS))
        folder = tmp_path / "case"
        shutil.copytree(whole, folder)
        description = damage(folder, command, chance, mark)
        try:
            undamaged = expected[command][0] if command in expected else ""
            check(command, folder, undamaged, is_whole="other" not in description)
        except (AssertionError, KeyError, OSError, ValueError) as error:
            failures.append(f"case {case}, {description}: {error!r}")
        assert not mark.exists(), f"case {case} ran code, {description}"
        shutil.rmtree(folder)
    assert not failures, "\n".join(failures)
