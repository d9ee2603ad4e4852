"""Pickled batches are read, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equilibria.data.readers import DataFileError, read_pickle
from tests.data.formats import cifar_batch, python2_pickle, random_bytes


def written(folder: Path, content: bytes) -> Path:
    path = folder / "data_batch_1"
    path.write_bytes(content)
    return path


def test_reads_what_python_2_wrote(tmp_path: Path) -> None:
    batch = cifar_batch(4, 0, labels=[3, 1, 4, 1])
    content = python2_pickle(batch)
    # The bytes above are indeed a pickle that numpy itself understands.
    assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"], batch["data"])
    found = read_pickle(written(tmp_path, content))
    assert torch.equal(found["data"], torch.from_numpy(batch["data"]))
    assert found["labels"] == [3, 1, 4, 1]
    assert found["filenames"][2] == "2.png"


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_reads_what_python_3_writes(tmp_path: Path, protocol: int) -> None:
    batch = cifar_batch(3, 1, labels=[0, 1, 2])
    found = read_pickle(written(tmp_path, pickle.dumps(batch, protocol=protocol)))
    assert torch.equal(found["data"], torch.from_numpy(batch["data"]))


def test_reads_arrays_in_the_order_of_fortran(tmp_path: Path) -> None:
    array = np.asfortranarray(random_bytes(4, 5))
    found = read_pickle(written(tmp_path, pickle.dumps({"data": array}, protocol=2)))
    assert torch.equal(found["data"], torch.from_numpy(np.ascontiguousarray(array)))


class Runs:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


MALICIOUS = {
    "system": lambda mark: pickle.dumps({"data": Runs(os.system, f"touch {mark}")}, protocol=2),
    "exec": lambda mark: pickle.dumps({"data": Runs(exec, f"open({str(mark)!r}, 'w')")}, 2),
    "getattr": lambda mark: pickle.dumps({"data": Runs(getattr, "", "join")}, protocol=2),
    "mkdir": lambda mark: pickle.dumps([Runs(os.mkdir, str(mark))], protocol=4),
    "global that is never called": lambda mark: b"\x80\x02cos\nsystem\n.",
    "dotted name": lambda mark: b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__class__\x93.",
    "numpy's loader": lambda mark: b"\x80\x02cnumpy\nload\n(U\x01xtR.",
    "old class": lambda mark: f"(S'touch {mark}'\nios\nsystem\n.".encode(),
    "outside object": lambda mark: b"\x80\x02U\x01xQ.",
    "extension": lambda mark: b"\x80\x02\x82\x01.",
    "change of a stand-in": lambda mark: b"\x80\x02cnumpy\ndtype\n}U\x08__call__Nsb.",
    "another encoding": lambda mark: b"\x80\x02c_codecs\nencode\n(X\x01\0\0\0aU\x03hextR.",
    "bytes from a number": lambda mark: b"\x80\x02c__builtin__\nbytes\n(J\xff\xff\xff\x7ftR.",
}


@pytest.mark.parametrize("attack", MALICIOUS)
def test_refuses_and_does_not_run(tmp_path: Path, attack: str) -> None:
    mark = tmp_path / "was-run"
    path = written(tmp_path, MALICIOUS[attack](mark))
    with pytest.raises(DataFileError, match=r"data_batch_1.*not a pickled batch") as caught:
        read_pickle(path)
    assert caught.value.path == path
    assert not mark.exists()


def test_the_refused_name_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, pickle.dumps({"data": Runs(os.getcwd)}, protocol=2))
    with pytest.raises(DataFileError, match=r"getcwd.*refused and not run"):
        read_pickle(path)


FOREIGN = {
    "empty": b"",
    "text": b"<html>not found</html>",
    "cut off": python2_pickle(cifar_batch(4, 0, labels=[0] * 4))[:-2000],
    "a list": pickle.dumps([1, 2]),
    "numbers for keys": pickle.dumps({1: 2}),
    "array of floats": pickle.dumps({"data": np.zeros(3)}, protocol=2),
    "array of objects": pickle.dumps({"data": np.array([{}, []], dtype=object)}, protocol=2),
    "a dictionary inside": pickle.dumps({"data": {"more": 1}}),
    "array without content": b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)Rs.",
    "deep lists": b"\x80\x02}U\x01d" + b"](" * 50_000 + b"e" * 50_000 + b"s.",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataFileError, match=r"data_batch_1: .*; replace it by a fresh copy"):
        read_pickle(written(tmp_path, FOREIGN[kind]))


def test_a_shape_must_fit_its_bytes(tmp_path: Path) -> None:
    content = pickle.dumps({"data": random_bytes(2, 3)}, protocol=4)
    lying = content.replace(b"K\x02K\x03\x86", b"K\xffK\xff\x86")
    assert lying != content
    with pytest.raises(DataFileError, match="does not have that many bytes"):
        read_pickle(written(tmp_path, lying))


def test_a_few_bytes_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    """The unpickler in C makes room for every place up to the one that is written to."""
    path = written(tmp_path, b"\x80\x02}r\x00\x00\x00\x01.")
    tracemalloc.start()
    try:
        assert read_pickle(path) == {}
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 4])
def test_damage_never_gives_another_error(tmp_path: Path, protocol: int) -> None:
    good = pickle.dumps({"data": random_bytes(2, 3), "labels": [1, 2], "b": b"x"}, protocol)
    chance = random.Random(protocol)
    refused = 0
    for _ in range(1500):
        spoilt = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
        try:
            read_pickle(written(tmp_path, bytes(spoilt)))
        except DataFileError:
            refused += 1
    assert refused > 500
