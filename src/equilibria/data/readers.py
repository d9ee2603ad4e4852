"""Readers of data files that run nothing of what is in them, and what goes wrong with files.

The idx format of MNIST is a magic number, the sizes, the bytes; `.npy` files are read without
pickles. CIFAR's batches are pickles, and a pickle is a program: its reader lets it build
dictionaries, lists, numbers, texts and arrays of bytes, the last from what the few numpy names that
those batches mention are called with; nothing is called. Any other name is refused.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

UNSIGNED_BYTES = 0x08
BYTE_TYPES = ("u1", "|u1", b"u1", b"|u1")
"""How a pickle may name the type of bytes."""


class MissingDataError(FileNotFoundError):
    """A data set is not where it was looked for."""


class DataFileError(ValueError):
    """A file of a data set is not what it should be."""

    def __init__(self, path: Path | str, what: str, remedy: str = "") -> None:
        self.path = Path(path)
        remedy = remedy or "replace it by a fresh copy of the original"
        super().__init__(f"{path}: {what}; {remedy}")


def incomplete(path: Path, what: str) -> DataFileError:
    """Where a folder lacks some of the files that it was published with."""
    return DataFileError(path, what, "unpack the whole data set there")


def read_idx(folder: Path, name: str, *, dimensions: int) -> tuple[Tensor, Path]:
    """The bytes of an idx file, `name` or `name.gz`, in so many dimensions; and which it was."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise MissingDataError(f"neither {name} nor {name}.gz is in {folder}: copy it there")
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataFileError(path, f"cannot be unzipped ({error})") from error
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataFileError(path, f"cut off: {len(content)} bytes do not hold an idx header")
    zeros, kind, found, *shape = struct.unpack(f">HBB{dimensions}I", content[:start])
    if zeros != 0 or kind != UNSIGNED_BYTES or found != dimensions:
        raise DataFileError(
            path, f"not an idx file of bytes in {dimensions} dimensions (begins {content[:4]!r})"
        )
    if len(content) - start != math.prod(shape):
        raise DataFileError(
            path,
            f"should hold {'×'.join(map(str, shape))} bytes, but {len(content) - start} follow",
        )
    return bytes_to_tensor(content[start:], shape), path


def read_npy(path: Path) -> Any:
    """The array of a `.npy` file, mapped: what is indexed is read from the disk."""
    try:
        # Of `np.load` the part for plain arrays alone: no pickles, no archives.
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError as error:
        raise MissingDataError(f"{path} is missing: unpack the whole data set there") from error
    except (EOFError, ValueError) as error:
        raise DataFileError(path, f"not a plain .npy file ({error})") from error


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary that a file holds; arrays of bytes in it become tensors."""
    stream = io.BytesIO(path.read_bytes())
    try:
        content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError("it holds no dictionary")
        plain = {_plain(key): _plain(value) for key, value in content.items()}
        if not all(isinstance(key, str) for key in plain):
            raise ValueError("it holds a dictionary whose keys are not text")
        return plain
    except Exception as error:
        # Damaged pickles raise nearly anything.
        raise DataFileError(path, f"not a pickled batch of CIFAR ({error})") from error


def bytes_to_tensor(content: bytes, shape: Sequence[int], order: Literal["C", "F"] = "C") -> Tensor:
    pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape, order=order)
    return torch.from_numpy(np.array(pixels, order="C"))


class _Pickled:
    """A name in the pickle, what it is called with, and the state it is given: nothing is run."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.name, self.arguments = name, arguments
        self.state: object = None

    def __call__(self, *arguments: object) -> _Pickled:
        return _Pickled(self.name, *arguments)

    def __setstate__(self, state: object) -> None:
        self.state = state


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler written in Python: the one in C takes memory as a file tells it to."""

    def find_class(self, module: str, name: str) -> _Pickled:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which was refused and not run"
            )
        return _Pickled(name)


def _plain(value: object) -> Any:
    """Data of the pickle as data of this library."""
    value = _content(value)
    if isinstance(value, _Pickled):
        return _tensor(value)
    if isinstance(value, list):
        return [_plain(element) for element in value]
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, (str, int)):
        return value
    raise ValueError(f"it holds a {type(value).__name__}")


def _content(value: object) -> object:
    """Python 3 writes bytes for Python 2 as text and an instruction to encode it."""
    if isinstance(value, _Pickled) and value.name == "encode":
        text, *encoding = value.arguments
        if isinstance(text, str) and encoding in (["latin1"], [b"latin1"]):
            return text.encode("latin1")
    return value


def _tensor(array: _Pickled) -> Tensor:
    if array.name != "_reconstruct" or not isinstance(array.state, tuple) or len(array.state) != 5:
        raise ValueError("it holds an array without content")
    _, shape, kind, is_fortran, content = array.state
    content = _content(content)
    if not isinstance(kind, _Pickled) or _content(kind.arguments[0]) not in BYTE_TYPES:
        raise ValueError("it holds an array of something else than bytes")
    if not isinstance(shape, tuple) or not all(
        isinstance(side, int) and side >= 0 for side in shape
    ):
        raise ValueError("it holds an array without a shape")
    if not isinstance(content, bytes) or len(content) != math.prod(shape):
        raise ValueError(f"its array of shape {shape} does not have that many bytes")
    return bytes_to_tensor(content, shape, "F" if is_fortran else "C")
