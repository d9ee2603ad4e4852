"""CIFAR's pickled batches, read without running anything that is in them.

A pickle is a program. This reader lets it build dictionaries, lists, numbers, texts and arrays of
bytes, the last through stand-ins for the few numpy names that CIFAR's batches mention; numpy's own
reconstruction is never called. Any other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from equilibria.data.errors import DataFileError

BYTE_TYPES: tuple[object, ...] = ("u1", "|u1", b"u1", b"|u1")


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary that a file holds; arrays of bytes in it become tensors."""
    stream = io.BytesIO(path.read_bytes())
    try:
        content = _Reader(stream, encoding="bytes").load()
    except Exception as error:
        # Damaged pickles raise nearly anything.
        raise DataFileError(path, f"not a pickled batch of CIFAR ({error})") from error
    if not isinstance(content, dict):
        raise DataFileError(path, "not a pickled batch of CIFAR (it holds no dictionary)")
    try:
        return {_text(key): _plain(value) for key, value in content.items()}
    except (RecursionError, TypeError, ValueError) as error:
        raise DataFileError(path, f"not a pickled batch of CIFAR ({error})") from error


class _StandIn:
    """Takes the place of a name in the pickle; cannot be changed by it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it tries to change what it may only use")

    def __call__(self, *arguments: object) -> object:
        raise pickle.UnpicklingError("it calls what is not a function")


class _PickledArray:
    """An array as its pickle describes it; checked when it becomes a tensor."""

    __slots__ = ("state",)
    state: object

    def __setstate__(self, state: object) -> None:
        self.state = state


class _PickledType:
    """The type of an array's elements."""

    __slots__ = ("name",)

    def __init__(self, name: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """The byte order, which bytes do not have."""


class _NewArray(_StandIn):
    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        return _PickledArray()


class _NewType(_StandIn):
    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        return _PickledType(arguments[0] if arguments else None)


class _Encode(_StandIn):
    """Python 3 writes bytes for Python 2 as text and an instruction to encode it."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        text, *encoding = arguments
        if not isinstance(text, str) or encoding not in (["latin1"], [b"latin1"]):
            raise pickle.UnpicklingError("it encodes text in another way than latin1")
        return text.encode("latin1")


class _Empty(_StandIn):
    """Python 3 writes empty bytes for Python 2 as a call without arguments."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> object:
        if arguments:
            raise pickle.UnpicklingError("it makes bytes from something")
        return b""


ALLOWED: dict[tuple[str, str], _StandIn] = {
    ("numpy.core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy._core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy", "ndarray"): _StandIn(),
    ("numpy", "dtype"): _NewType(),
    ("_codecs", "encode"): _Encode(),
    ("__builtin__", "bytes"): _Empty(),
}


class _Reader(pickle._Unpickler):
    """Python's own unpickler written in Python: the one in C takes memory as a file tells it to."""

    def find_class(self, module: str, name: str) -> _StandIn:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which was refused and not run"
            ) from None

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def _plain(value: object) -> object:
    """Data of the pickle as data of this library."""
    if isinstance(value, _PickledArray):
        return _tensor(value)
    if isinstance(value, list):
        return [_plain(element) for element in value]
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, (str, int)):
        return value
    raise ValueError(f"it holds a {type(value).__name__}")


def _tensor(array: _PickledArray) -> Tensor:
    state = getattr(array, "state", None)
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("it holds an array without content")
    _, shape, kind, is_fortran, content = state
    if not isinstance(kind, _PickledType) or kind.name not in BYTE_TYPES:
        raise ValueError("it holds an array of something else than bytes")
    if not isinstance(shape, tuple) or not all(
        isinstance(side, int) and side >= 0 for side in shape
    ):
        raise ValueError("it holds an array without a shape")
    if not isinstance(content, bytes) or len(content) != math.prod(shape):
        raise ValueError(f"its array of shape {shape} does not have that many bytes")
    if not content:
        return torch.zeros(shape, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if is_fortran:
        return flat.reshape(shape[::-1]).permute(*reversed(range(len(shape)))).contiguous()
    return flat.reshape(shape)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, str):
        return value
    raise ValueError(f"its keys are of type {type(value).__name__}, not text")
