"""The idx format of MNIST: a magic number, the sizes, the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from equilibria.data.errors import DataFileError, MissingDataError

UNSIGNED_BYTES = 0x08


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """The bytes of an idx file, plain or gzipped, as a tensor of so many dimensions."""
    content = _content(path)
    if len(content) < 4 + 4 * dimensions:
        raise DataFileError(path, f"cut off: {len(content)} bytes do not hold an idx header")
    zeros, kind, found = struct.unpack(">HBB", content[:4])
    if zeros != 0 or kind != UNSIGNED_BYTES or found != dimensions:
        raise DataFileError(
            path, f"not an idx file of bytes in {dimensions} dimensions (begins {content[:4]!r})"
        )
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    body = bytearray(content[4 + 4 * dimensions :])
    if len(body) != math.prod(shape):
        raise DataFileError(
            path, f"should hold {'×'.join(map(str, shape))} bytes, but {len(body)} follow"
        )
    if not body:
        return torch.zeros(shape, dtype=torch.uint8)
    return torch.frombuffer(body, dtype=torch.uint8).reshape(shape)


def find_idx(folder: Path, name: str) -> Path:
    """The file of this name, or the gzipped one."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise MissingDataError(f"neither {name} nor {name}.gz is in {folder}: copy it there")


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFileError(path, f"cannot be unzipped ({error})") from error
