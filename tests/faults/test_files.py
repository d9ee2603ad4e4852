"""Invalid and malicious files raise errors that name the file and the remedy, with bounded work.

The work is bounded by memory measurements or counts; a test that hangs has failed.
"""

from __future__ import annotations

import gzip
import os
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equilibria.data import DataFileError, MissingDataError, find_images, load_dataset, readers
from equilibria.training.recipe import MAX_VALUES, RecipeError, load_recipe, parse_yaml
from tests.data.formats import (
    cifar_batch,
    idx_bytes,
    python2_pickle,
    random_bytes,
    write_cifar10,
    write_cifar100,
    write_class_folders,
    write_mnist,
)
from tests.data.test_sets import WNIDS

# Opening and closing opcodes of pickles of a few bytes that expand exponentially.
HALVES = {
    "lists": (b"](", b"e"),
    "tuples": (b"(", b"t"),
}


def nested(kind: str, levels: int = 60) -> bytes:
    """Return a pickled list or tuple that contains the next smaller one twice: 2^levels leaves."""
    opening, closing = HALVES[kind]
    built = opening + b"K\x01K\x01" + closing + b"q\x00"
    for level in range(levels):
        built += b"0" + opening + b"h%c" % level * 2 + closing + b"q%c" % (level + 1)
    return built


def long_text() -> bytes:
    return b"X" + struct.pack("<I", 100_000) + b"x" * 100_000 + b"q\x00"


BOMBS: dict[str, bytes] = {
    "lists in lists": b"\x80\x02}U\x06labels" + nested("lists") + b"s.",
    "lists in lists, not in a dictionary": b"\x80\x02" + nested("lists") + b".",
    "tuples in tuples": b"\x80\x02}U\x06labels" + nested("tuples") + b"s.",
    "a key that is hashed": b"\x80\x02}" + nested("tuples") + b"K\x01s.",
    "keys that are hashed": b"\x80\x02}(" + nested("tuples") + b"K\x01u.",
    "keys of a dictionary, protocol 0": b"\x80\x02(" + nested("tuples") + b"K\x01d.",
    "members of a set": b"\x80\x04\x8f(" + nested("tuples") + b"\x90.",
    "members of a frozen set": b"\x80\x04(" + nested("tuples") + b"\x91.",
    "a tuple in a list": b"\x80\x02}U\x06labels](" + nested("tuples") + b"es.",
    "arguments": b"\x80\x02}U\x04datacnumpy\ndtype\n" + nested("tuples") + b"Rs.",
    "a shape": b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01"
    + nested("tuples")
    + b"cnumpy\ndtype\n(U\x02u1tR\x89U\x00tbs.",
    "a byte array as long as it says": b"\x80\x05}U\x04data\x96" + b"\xff" * 7 + b"\x3fs.",
    "many keys for one list": b"\x80\x02}("
    + b"U\x01a]q\x00("
    + b"K\x01" * 5000
    + b"e"
    + b"".join(b"U\x04%04dh\x00" % number for number in range(5000))
    + b"u.",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_pickle_that_expands_exponentially_is_an_error_with_little_work(
    tmp_path: Path, kind: str
) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(BOMBS[kind])
    tracemalloc.start()
    try:
        with pytest.raises(DataFileError, match=r"data_batch_2: .*; ") as caught:
            load_dataset("cifar10", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 500


def test_repeated_text_in_a_pickle_is_stored_once(tmp_path: Path) -> None:
    """Copies of the text for all 10,000 references would take a gigabyte."""
    path = tmp_path / "meta"
    bomb = b"\x80\x02}U\x04text](" + long_text() + b"h\x00" * 10_000 + b"es."
    path.write_bytes(bomb)
    tracemalloc.start()
    try:
        texts = readers.read_pickle(path)["text"]
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert len(texts) == 10_001
    assert len({id(text) for text in texts}) == 1


def damaged(content: bytes, chance: random.Random) -> bytes:
    result = bytearray(content[: chance.randint(1, len(content))])
    for _ in range(chance.randint(0, 3)):
        result[chance.randrange(len(result))] = chance.randrange(256)
    return bytes(result)


def test_damaged_files_of_every_format_give_data_or_a_data_file_error(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", samples=2)
    write_cifar100(tmp_path / "cifar-100-python", samples=2)
    write_mnist(tmp_path / "MNIST" / "raw", zipped=True, samples=2)
    np.save(tmp_path / "labels.npy", np.zeros(5, dtype=np.uint8))
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", random_bytes(5, 32, 32, 3))
    np.save(tmp_path / "CIFAR-10-C" / "gaussian_noise.npy", random_bytes(5, 32, 32, 3))
    (tmp_path / "labels.npy").rename(tmp_path / "CIFAR-10-C" / "labels.npy")
    files: list[tuple[str, str, dict[str, Any]]] = [
        ("cifar10", "cifar-10-batches-py/data_batch_3", {}),
        ("cifar100", "cifar-100-python/train", {}),
        ("cifar100", "cifar-100-python/meta", {}),
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz", {}),
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte.gz", {}),
        ("cifar10-c", "CIFAR-10-C/fog.npy", {"corruption": "fog"}),
        ("cifar10-c", "CIFAR-10-C/labels.npy", {"corruption": "fog"}),
    ]
    chance = random.Random(0)
    for name, file, options in files:
        path = tmp_path / file
        good, errors = path.read_bytes(), []
        for _ in range(40):
            path.write_bytes(damaged(good, chance))
            try:
                load_dataset(name, tmp_path, **options)
            except DataFileError as error:
                errors.append(str(error))
        path.write_bytes(good)
        assert len(errors) > 20
        assert all("; " in message and "\n" not in message for message in errors)


def test_zipped_idx_file_is_unzipped_only_to_its_stated_size(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", zipped=True)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    stated = idx_bytes(np.zeros((20, 28, 28), dtype=np.uint8))
    path.write_bytes(gzip.compress(stated + bytes(2**26)))
    tracemalloc.start()
    try:
        with pytest.raises(DataFileError, match=r"20×28×28 bytes, but more follow; replace it"):
            load_dataset("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("zipped", [False, True])
def test_absurd_stated_size_is_an_error(tmp_path: Path, zipped: bool) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", zipped=zipped)
    name = "train-images-idx3-ubyte" + (".gz" if zipped else "")
    header = struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**16, 2**16) + bytes(1000)
    (tmp_path / "MNIST" / "raw" / name).write_bytes(gzip.compress(header) if zipped else header)
    with pytest.raises(DataFileError, match=r"header states .*, more than the limit of 1,07"):
        load_dataset("mnist", tmp_path)


def test_flipped_bit_in_a_zipped_idx_file_is_an_error_or_harmless(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", zipped=True)
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    good, chance = path.read_bytes(), random.Random(0)
    expected = load_dataset("mnist", tmp_path).train.fetch(torch.arange(20))
    for place in range(len(good)):
        flipped = bytearray(good)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            data = load_dataset("mnist", tmp_path).train.fetch(torch.arange(20))
        except DataFileError:
            continue
        assert all(map(torch.equal, data, expected))


def test_file_above_the_size_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_BYTES", 2000)
    write_cifar10(tmp_path / "cifar-10-batches-py", samples=1)
    with pytest.raises(
        DataFileError, match=r"data_batch_1: .* bytes, more than the limit of 2,000"
    ):
        load_dataset("cifar10", tmp_path)


PIPES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cifar-10-batches-py/data_batch_1": (
        "cifar10",
        lambda root: write_cifar10(root / "cifar-10-batches-py"),
    ),
    "cifar-100-python/meta": ("cifar100", lambda root: write_cifar100(root / "cifar-100-python")),
    "MNIST/raw/train-images-idx3-ubyte": (
        "mnist",
        lambda root: write_mnist(root / "MNIST" / "raw", zipped=False),
    ),
    f"imagenette2/train/{WNIDS[0]}/0.png": (
        "imagenette",
        lambda root: write_class_folders(root / "imagenette2", WNIDS),
    ),
}


@pytest.mark.parametrize("file", PIPES)
def test_pipe_instead_of_a_file_is_an_error(tmp_path: Path, file: str) -> None:
    name, write = PIPES[file]
    write(tmp_path)
    (tmp_path / file).unlink()
    os.mkfifo(tmp_path / file)

    def read() -> None:
        data = load_dataset(name, tmp_path)
        data.train.fetch(torch.arange(len(data.train)))

    with pytest.raises((DataFileError, MissingDataError), match=Path(file).name):
        read()


def test_pipe_among_images_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="there is no file or folder"):
        find_images([tmp_path / "a.png"])


def alias_bomb(levels: int) -> str:
    """Return YAML whose aliases expand to 9^levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


RECIPE = """
model: {name: opteq-small, options: %s}
data: {name: digits}
training: {epochs: 1}
"""

YAML: dict[str, tuple[str, str]] = {
    "aliases of aliases": (f"{alias_bomb(30)}\n{RECIPE % '{channels: *a29}'}", "aliases"),
    "an alias of itself": (RECIPE % "&me {channels: [*me]}", "aliases"),
    "nested merges": (
        "a0: &a0 {k: 1}\n"
        + "\n".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 30)),
        "aliases",
    ),
    "deep": (RECIPE % ("[" * 5000 + "]" * 5000), "nested too deeply"),
    "long": ("# " + "x" * 300_000, "more than 262,144 characters"),
    "many values": (RECIPE % ("[" + "1," * 20_000 + "]"), "more than 10,000 values"),
    "bytes": ("\udcff\udcfe", "not YAML"),
    "a date": ("about: 2024-13-45", "month"),
    "a tag without a value": ("about: !!int ''", "not YAML"),
    "code": ("about: !!python/object/apply:os.system ['true']", "could not determine a constr"),
    "a key that is a list": ("? [1, 2]\n: 3", "key"),
    "two documents": ("a: 1\n---\nb: 2", "document"),
}


@pytest.mark.parametrize("kind", YAML)
def test_invalid_recipe_is_an_error_on_one_line(tmp_path: Path, kind: str) -> None:
    text, message = YAML[kind]
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RecipeError, match=rf"bad\.yaml.*{message}") as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["[1", "&a [*a]", "!!int ''", "[" * 5000])
def test_invalid_override_is_an_error(tmp_path: Path, value: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE % "{}")
    with pytest.raises(RecipeError, match=r"'training\.epochs' is not YAML"):
        load_recipe(path, [f"training.epochs={value}"])


def test_small_aliases_are_followed() -> None:
    assert parse_yaml("a: &a {k: [1, 2]}\nb: *a\nc: {<<: *a, d: 3}") == {
        "a": {"k": [1, 2]},
        "b": {"k": [1, 2]},
        "c": {"k": [1, 2], "d": 3},
    }
    assert parse_yaml("") is None
    assert len(parse_yaml("[" + "1," * (MAX_VALUES - 1) + "]")) == MAX_VALUES - 1


def test_pickles_of_all_protocols_are_read_alike(tmp_path: Path) -> None:
    """Includes the format of Python 2 and the protocols before Python 3.8."""
    batch = cifar_batch(3, 0, labels=[1, 2, 3])
    path = tmp_path / "batch"
    for content in (python2_pickle(batch), *(pickle.dumps(batch, protocol=p) for p in range(5))):
        path.write_bytes(content)
        restored = readers.read_pickle(path)
        assert torch.equal(restored["data"], torch.from_numpy(batch["data"]))
        assert restored["labels"] == [1, 2, 3]
        assert restored["filenames"] == ["0.png", "1.png", "2.png"]
