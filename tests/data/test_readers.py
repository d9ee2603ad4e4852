"""Pickled batches of CIFAR are read without running code from the file."""

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


def test_reads_pickles_of_python_2(tmp_path: Path) -> None:
    batch = cifar_batch(4, 0, labels=[3, 1, 4, 1])
    content = python2_pickle(batch)
    # Check that the bytes are a valid pickle.
    assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"], batch["data"])
    result = read_pickle(written(tmp_path, content))
    assert torch.equal(result["data"], torch.from_numpy(batch["data"]))
    assert result["labels"] == [3, 1, 4, 1]
    assert result["filenames"][2] == "2.png"


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_reads_pickles_of_python_3(tmp_path: Path, protocol: int) -> None:
    batch = cifar_batch(3, 1, labels=[0, 1, 2])
    result = read_pickle(written(tmp_path, pickle.dumps(batch, protocol=protocol)))
    assert torch.equal(result["data"], torch.from_numpy(batch["data"]))


def test_reads_arrays_in_column_major_order(tmp_path: Path) -> None:
    array = np.asfortranarray(random_bytes(4, 5))
    result = read_pickle(written(tmp_path, pickle.dumps({"data": array}, protocol=2)))
    assert torch.equal(result["data"], torch.from_numpy(np.ascontiguousarray(array)))


class Runs:
    """Object whose pickle calls `function`."""

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
def test_malicious_pickles_raise_and_run_nothing(tmp_path: Path, attack: str) -> None:
    mark = tmp_path / "was-run"
    path = written(tmp_path, MALICIOUS[attack](mark))
    with pytest.raises(DataFileError, match=r"data_batch_1.*not a pickled batch") as caught:
        read_pickle(path)
    assert caught.value.path == path
    assert not mark.exists()


def test_the_error_names_the_function_that_is_not_allowed(tmp_path: Path) -> None:
    path = written(tmp_path, pickle.dumps({"data": Runs(os.getcwd)}, protocol=2))
    with pytest.raises(DataFileError, match=r"getcwd.*not allowed and was not run"):
        read_pickle(path)


FOREIGN = {
    "empty": b"",
    "text": b"<html>not result</html>",
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
def test_the_error_names_a_file_that_is_not_a_batch(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataFileError, match=r"data_batch_1: .*; replace it by a fresh copy"):
        read_pickle(written(tmp_path, FOREIGN[kind]))


def test_the_shape_must_match_the_number_of_bytes(tmp_path: Path) -> None:
    content = pickle.dumps({"data": random_bytes(2, 3)}, protocol=4)
    modified = content.replace(b"K\x02K\x03\x86", b"K\xffK\xff\x86")
    assert modified != content
    with pytest.raises(DataFileError, match="has a different number of bytes"):
        read_pickle(written(tmp_path, modified))


def test_a_small_file_cannot_allocate_much_memory(tmp_path: Path) -> None:
    """The unpickler in C would allocate all memo entries up to the largest index."""
    path = written(tmp_path, b"\x80\x02}r\x00\x00\x00\x01.")
    tracemalloc.start()
    try:
        assert read_pickle(path) == {}
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", [2, 4])
def test_damaged_pickles_raise_no_other_error(tmp_path: Path, protocol: int) -> None:
    good = pickle.dumps({"data": random_bytes(2, 3), "labels": [1, 2], "b": b"x"}, protocol)
    rng = random.Random(protocol)
    rejected = 0
    for _ in range(1500):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            read_pickle(written(tmp_path, bytes(damaged)))
        except DataFileError:
            rejected += 1
    assert rejected > 500
