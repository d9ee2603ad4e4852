"""Files that are either the old or the new one, never half of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import nn


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Without this, a crash of the machine may keep the new name and lose the content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    with atomic_writer(path) as file:
        file.write(content)


def save_weights(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Parameters and buffers as a safetensors file, which loads without running any code."""
    from safetensors.torch import save

    tensors = {
        name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()
    }
    write_atomically(path, save(tensors, metadata=dict(metadata or {})))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote into a model of the same shape; anything else is an error."""
    from safetensors.torch import load

    model.load_state_dict(load(path.read_bytes()), strict=True)
