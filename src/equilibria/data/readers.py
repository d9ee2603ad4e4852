"""Readers of data files that never run code from a file, and errors of data files.

A file in MNIST's idx format is a magic number, the sizes and the bytes. `.npy` files are read
without pickles. CIFAR's batches are pickles, which are programs. The reader of pickles only builds
dictionaries, lists, numbers, text and arrays of bytes. It calls no function: arrays are rebuilt
from the arguments of the few numpy functions that the batches name, and any other name raises.

Sizes in headers are not trusted: time and memory are bounded by the size of the file.
"""

from __future__ import annotations

import functools
import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

MAX_BYTES = 2**30
"""Largest size of a file that is read into memory, uncompressed; published ones are far smaller."""
UNSIGNED_BYTES = 0x08
BYTE_TYPES = ("u1", "|u1", b"u1", b"|u1")
"""Names of the type of bytes in pickles."""
MAX_KEYS = 16
"""Largest number of keys of a pickled dictionary; CIFAR's have five."""


class MissingDataError(FileNotFoundError):
    """A data set or one of its files is missing."""


class DataFileError(ValueError):
    """A data file is damaged, has an unexpected content, or cannot be read.

    Args:
        path: The file.
        what: What is wrong with it.
        remedy: What the user can do; by default, replacing the file.
    """

    def __init__(self, path: Path | str, what: str, remedy: str = "") -> None:
        self.path = Path(path)
        remedy = remedy or "replace it by a fresh copy of the original"
        super().__init__(f"{path}: {what}; {remedy}")
        self._parts = (path, what, remedy)

    def __reduce__(self) -> Any:
        """Pickle the arguments: the default would pickle the message alone."""
        return type(self), self._parts


def incomplete(path: Path, problem: str) -> DataFileError:
    """Return the error of a folder that lacks published files."""
    return DataFileError(path, problem, "unpack the whole data set there")


def check_plain_file(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        DataFileError: If it is missing or not a regular file; reading a pipe might never end.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataFileError(path, f"cannot be read ({error.strerror})", "put it there") from error
    if not S_ISREG(status.st_mode):
        raise DataFileError(path, "not a file, but a folder, a pipe or a device", "remove it")
    return status.st_size


def read_bytes(path: Path) -> bytes:
    """Return the content of a file of at most `MAX_BYTES` bytes."""
    size = check_plain_file(path)
    if size > MAX_BYTES:
        raise DataFileError(path, f"has {size:,} bytes, more than the limit of {MAX_BYTES:,}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataFileError(path, f"cannot be read ({error.strerror})") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return read_bytes(path).decode(errors="replace").splitlines()


def read_idx(folder: Path, name: str, *, dimensions: int) -> tuple[Tensor, Path]:
    """Read the idx file `name` or `name.gz`; return its bytes as a tensor, and its path."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise MissingDataError(f"neither {name} nor {name}.gz is in {folder}: copy it there")
    start, is_zipped = 4 + 4 * dimensions, path.suffix == ".gz"
    try:
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            header = file.read(start)
            if len(header) < start:
                raise DataFileError(
                    path, f"truncated: its header has {len(header)} bytes instead of {start}"
                )
            zeros, type_code, rank, *shape = struct.unpack(f">HBB{dimensions}I", header)
            if zeros != 0 or type_code != UNSIGNED_BYTES or rank != dimensions:
                problem = f"not an idx file of bytes in {dimensions} dimensions"
                raise DataFileError(path, f"{problem} (begins with {header[:4]!r})")
            size, sizes = math.prod(shape), "×".join(map(str, shape))
            if size > MAX_BYTES:
                problem = f"its header states {sizes} bytes, more than the limit of {MAX_BYTES:,}"
                raise DataFileError(path, problem)
            # Reading one byte more detects files that are too long, and makes gzip verify its
            # checksum at the end.
            content = file.read(size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataFileError(path, f"cannot be unzipped or read ({error})") from error
    if len(content) != size:
        actual = "more" if len(content) > size else len(content)
        raise DataFileError(path, f"its header states {sizes} bytes, but {actual} follow")
    return bytes_to_tensor(content, shape), path


def read_npy(path: Path) -> Any:
    """Return the array of a `.npy` file, mapped into memory."""
    if not path.exists():
        raise MissingDataError(f"{path} is missing: unpack the whole data set there")
    check_plain_file(path)
    try:
        # Unlike `np.load`, this reads only plain arrays: no pickles, no archives.
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:
        # Damaged headers raise almost any exception.
        raise DataFileError(path, f"not a plain .npy file ({error})") from error


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a pickle file; arrays of bytes become tensors."""
    stream = io.BytesIO(read_bytes(path))
    try:
        content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict) or len(content) > MAX_KEYS:
            raise ValueError(f"it does not hold a dictionary of at most {MAX_KEYS} keys")
        return {_text(key): _plain(value) for key, value in content.items()}
    except Exception as error:
        # Damaged pickles raise almost any exception.
        raise DataFileError(path, f"not a pickled batch of CIFAR ({error!s:.200})") from error


def bytes_to_tensor(content: bytes, shape: Sequence[int], order: Literal["C", "F"] = "C") -> Tensor:
    """Return the bytes as a `uint8` tensor of a shape, in row-major or column-major order."""
    pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape, order=order)
    return torch.from_numpy(np.array(pixels, order="C"))


class _Pickled:
    """A name in a pickle, with its arguments and state, in place of a call of what it names."""

    def __init__(self, name: str, arguments: tuple[object, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: object = None

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
    """Unpickler of the types in CIFAR's batches, in a time bounded by the length of the file.

    Objects that a pickle refers to repeatedly are not expanded, copied or hashed, because a few
    bytes can describe nested lists of astronomical length. The base class is the unpickler in
    Python: the one in C allocates as much memory as the file requests.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> _Pickled:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"it refers to {module:.80}.{name:.80}, which is not allowed and was not run"
            )
        return _Pickled(name)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Pickled) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("it calls an object that is not a function")
        self.stack.append(_Pickled(function.name, arguments))

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._set(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (bytes, str, _Pickled)):
                raise pickle.UnpicklingError("it holds a dictionary whose keys are not text")
            self.stack[-1][key] = value

    def refuse(self) -> None:
        raise pickle.UnpicklingError("it holds a set or a bytearray, which CIFAR's batches do not")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.ADDITEMS[0]: refuse,
        pickle.FROZENSET[0]: refuse,
        pickle.BYTEARRAY8[0]: refuse,
        pickle.REDUCE[0]: load_reduce,
        pickle.DICT[0]: load_dict,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _plain(value: object) -> Any:
    """Convert an unpickled value to a tensor, number, string, or list of these."""
    if isinstance(value, _Pickled) and value.name == "_reconstruct":
        return _tensor(value)
    if not isinstance(value, list):
        return value if isinstance(value, int) else _text(value)
    # A list can refer to one long text many times: convert it once.
    text = functools.cache(_text)
    for element in value:
        if not isinstance(element, (int, bytes, str, _Pickled)):
            raise ValueError(f"it holds a list with a {type(element).__name__}")
    return [element if isinstance(element, int) else text(element) for element in value]


def _text(value: object) -> str:
    content = _content(value)
    if not isinstance(content, (bytes, str)):
        raise ValueError(f"it holds a {type(value).__name__}")
    return content.decode("latin1") if isinstance(content, bytes) else content


def _content(value: object) -> object:
    """Undo Python 3's protocol for Python 2, where bytes are text and a call that encodes it."""
    if isinstance(value, _Pickled) and value.name == "encode":
        text, encoding = value.arguments
        if isinstance(text, str) and encoding in ("latin1", b"latin1"):
            return text.encode("latin1")
    return value


def _tensor(array: _Pickled) -> Tensor:
    if not isinstance(array.state, tuple) or len(array.state) != 5:
        raise ValueError("it holds an array without content")
    _, shape, kind, is_fortran, content = array.state
    content = _content(content)
    if not isinstance(kind, _Pickled) or _content(kind.arguments[0]) not in BYTE_TYPES:
        raise ValueError("it holds an array whose elements are not bytes")
    if not isinstance(shape, tuple) or not 1 <= len(shape) <= 2:
        raise ValueError("it holds an array that has neither one nor two dimensions")
    if not all(isinstance(side, int) and 0 <= side <= MAX_BYTES for side in shape):
        raise ValueError("it holds an array without a valid size")
    if not isinstance(content, bytes) or len(content) != math.prod(shape):
        raise ValueError(f"its array of shape {shape} has a different number of bytes")
    return bytes_to_tensor(content, shape, "F" if is_fortran else "C")
