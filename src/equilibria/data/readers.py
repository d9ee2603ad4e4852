"""Readers of data files that run nothing of what is in them, and what goes wrong with files.

The idx format of MNIST is a magic number, the sizes, the bytes; `.npy` files are read without
pickles. CIFAR's batches are pickles, and a pickle is a program: its reader lets it build
dictionaries, lists, numbers, texts and arrays of bytes, the last from what the few numpy names that
those batches mention are called with; nothing is called. Any other name is refused.

What a file says of its own size is not believed: time and memory are bounded by what is there.
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

MOST_BYTES = 2**30
"""Of a file that is read into memory, unzipped: far more than the published ones have."""
UNSIGNED_BYTES = 0x08
BYTE_TYPES = ("u1", "|u1", b"u1", b"|u1")
"""How a pickle may name the type of bytes."""
MOST_KEYS = 16
"""Of a pickled dictionary; CIFAR's have five."""


class MissingDataError(FileNotFoundError):
    """A data set is not where it was looked for."""


class DataFileError(ValueError):
    """A file of a data set is not what it should be."""

    def __init__(self, path: Path | str, what: str, remedy: str = "") -> None:
        self.path = Path(path)
        remedy = remedy or "replace it by a fresh copy of the original"
        super().__init__(f"{path}: {what}; {remedy}")
        self._parts = (path, what, remedy)

    def __reduce__(self) -> Any:
        """Between processes it stays what it is."""
        return type(self), self._parts


def incomplete(path: Path, what: str) -> DataFileError:
    """Where a folder lacks some of the files that it was published with."""
    return DataFileError(path, what, "unpack the whole data set there")


def check_plain_file(path: Path) -> int:
    """The size of a file; an error if it is none: reading from a pipe might never end."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataFileError(path, f"cannot be read ({error.strerror})", "put it there") from error
    if not S_ISREG(status.st_mode):
        raise DataFileError(path, "a folder, a pipe or a device, not a file", "remove it")
    return status.st_size


def read_bytes(path: Path) -> bytes:
    """What is in a file, as a whole."""
    size = check_plain_file(path)
    if size > MOST_BYTES:
        raise DataFileError(path, f"{size:,} bytes, more than the {MOST_BYTES:,} that are read")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataFileError(path, f"cannot be read ({error.strerror})") from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return read_bytes(path).decode(errors="replace").splitlines()


def read_idx(folder: Path, name: str, *, dimensions: int) -> tuple[Tensor, Path]:
    """The bytes of an idx file, `name` or `name.gz`, in so many dimensions; and which it was."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise MissingDataError(f"neither {name} nor {name}.gz is in {folder}: copy it there")
    start, is_zipped = 4 + 4 * dimensions, path.suffix == ".gz"
    try:
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            header = file.read(start)
            if len(header) < start:
                raise DataFileError(path, f"cut off: {len(header)} bytes do not hold an idx header")
            zeros, kind, found, *shape = struct.unpack(f">HBB{dimensions}I", header)
            if zeros != 0 or kind != UNSIGNED_BYTES or found != dimensions:
                what = f"not an idx file of bytes in {dimensions} dimensions"
                raise DataFileError(path, f"{what} (begins {header[:4]!r})")
            size, sizes = math.prod(shape), "×".join(map(str, shape))
            if size > MOST_BYTES:
                what = (
                    f"says that it holds {sizes} bytes, more than the {MOST_BYTES:,} that are read"
                )
                raise DataFileError(path, what)
            # One more than there should be: there the end is seen, and gzip's checksum tested.
            content = file.read(size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataFileError(path, f"cannot be unzipped or read ({error})") from error
    if len(content) != size:
        follow = "more" if len(content) > size else len(content)
        raise DataFileError(path, f"should hold {sizes} bytes, but {follow} follow")
    return bytes_to_tensor(content, shape), path


def read_npy(path: Path) -> Any:
    """The array of a `.npy` file, mapped: what is indexed is read from the disk."""
    if not path.exists():
        raise MissingDataError(f"{path} is missing: unpack the whole data set there")
    check_plain_file(path)
    try:
        # Of `np.load` the part for plain arrays alone: no pickles, no archives.
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:
        # Damaged headers raise nearly anything.
        raise DataFileError(path, f"not a plain .npy file ({error})") from error


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary that a file holds; arrays of bytes in it become tensors."""
    stream = io.BytesIO(read_bytes(path))
    try:
        content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict) or len(content) > MOST_KEYS:
            raise ValueError(f"it holds no dictionary of at most {MOST_KEYS} keys")
        return {_text(key): _plain(value) for key, value in content.items()}
    except Exception as error:
        # Damaged pickles raise nearly anything.
        raise DataFileError(path, f"not a pickled batch of CIFAR ({error!s:.200})") from error


def bytes_to_tensor(content: bytes, shape: Sequence[int], order: Literal["C", "F"] = "C") -> Tensor:
    """Return the bytes as a `uint8` tensor of a shape."""
    pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape, order=order)
    return torch.from_numpy(np.array(pixels, order="C"))


class _Pickled:
    """A name in the pickle, what it is called with, and the state it is given: nothing is run."""

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
    """Builds what a batch of CIFAR holds, in a time that is bounded by the length of the file.

    What a pickle refers to many times is neither written out nor copied nor hashed: a few bytes can
    describe lists in lists of astronomical length. (Python's unpickler written in Python, because
    the one in C takes memory as a file tells it to.)
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> _Pickled:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module:.80}.{name:.80}, which was refused and not run"
            )
        return _Pickled(name)

    def load_reduce(self) -> None:
        arguments, named = self.stack.pop(), self.stack.pop()
        if not isinstance(named, _Pickled) or not isinstance(arguments, tuple):
            raise pickle.UnpicklingError("it calls what is not a function")
        self.stack.append(_Pickled(named.name, arguments))

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
        raise pickle.UnpicklingError("it holds a set or an array that no batch of CIFAR does")

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
    """Data of the pickle as data of this library."""
    if isinstance(value, _Pickled) and value.name == "_reconstruct":
        return _tensor(value)
    if not isinstance(value, list):
        return value if isinstance(value, int) else _text(value)
    # Each text is made once, however often the list refers to it.
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
    """Python 3 writes bytes for Python 2 as text and an instruction to encode it."""
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
        raise ValueError("it holds an array of something else than bytes")
    if not isinstance(shape, tuple) or not 1 <= len(shape) <= 2:
        raise ValueError("it holds an array that is neither a row nor a table")
    if not all(isinstance(side, int) and 0 <= side <= MOST_BYTES for side in shape):
        raise ValueError("it holds an array without a size")
    if not isinstance(content, bytes) or len(content) != math.prod(shape):
        raise ValueError(f"its array of shape {shape} does not have that many bytes")
    return bytes_to_tensor(content, shape, "F" if is_fortran else "C")
