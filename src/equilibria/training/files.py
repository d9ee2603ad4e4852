"""Files that are written whole or not at all, and that say so when they are damaged."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from torch import Tensor, nn

from equilibria.models.pretrained import LATENTS

CHECKSUM = "sha256"
MOST_TEXT = 2**26
"""Bytes of a text file of a run: metrics of a hundred thousand epochs."""
WEIGHTS_OVERHEAD = 2**26
"""Bytes that a file of weights may have besides the weights: names, and latents of images."""
BLANK = "0" * 64
"""Stands in a file of weights where its checksum will be."""


class DamagedFileError(ValueError):
    """A file is not what was written: bits have changed, or a part is missing."""


def checksum(content: bytes) -> str:
    """Return the SHA-256 checksum of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def checksum_of_file(path: Path) -> str:
    """The checksum of a file's content, of which little is in memory at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Without this, a crash of the machine may keep the new name and lose the content.
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename != str(path):
            # The system names no file, or the temporary one.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name first: a kill leaves the old one, or the new one.

    Examples:
        >>> from pathlib import Path
        >>> from equilibria.training.files import write_atomically
        >>> write_atomically(Path("notes.txt"), b"done")
        >>> Path("notes.txt").read_bytes()
        b'done'
    """
    with atomic_writer(path) as file:
        file.write(content)


def temporary_name(path: Path) -> Path:
    """Beside `path`, for this process alone; `remove_temporary` finds what a kill has left."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a path is named like an unfinished file of a writer."""
    return re.fullmatch(r"\..+\.\d+\.tmp", path.name) is not None


def remove_temporary(folder: Path) -> None:
    """Remove what killed writers left in a folder that nobody writes to."""
    for left in filter(is_temporary, folder.glob(".*.tmp")):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def sync_folder(folder: Path) -> None:
    """Make a rename in a folder durable, where folders can be synced at all."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(data: Any, *, indent: int | None = 2) -> str:
    """Data as JSON, dataclasses as objects; it has no NaN and no infinity: these become null.

    Examples:
        >>> from equilibria.training.files import json_text
        >>> json_text({"accuracy": 0.5, "loss": float("nan")}, indent=None)
        '{"accuracy": 0.5, "loss": null}'
    """

    def finite(value: Any) -> Any:
        if is_dataclass(value):
            return {field.name: finite(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(data), indent=indent, allow_nan=False, ensure_ascii=False)


def sealed_json(data: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """Data as JSON with the checksum of all of it.

    Examples:
        >>> from equilibria.training.files import sealed_json, unsealed
        >>> text = sealed_json({"accuracy": 0.5})
        >>> unsealed(text, "an example")
        {'accuracy': 0.5}
    """
    plain = json.loads(json_text(data))
    return json_text({**plain, CHECKSUM: _seal(plain)}, indent=indent)


def unsealed(text: str, name: object) -> dict[str, Any]:
    """Return what `sealed_json` was given.

    Raises:
        DamagedFileError: If the text is not as `sealed_json` made it.

    Examples:
        >>> from equilibria.training.files import sealed_json, unsealed
        >>> text = sealed_json({"accuracy": 0.5}).replace("0.5", "0.9")
        >>> unsealed(text, "results.json")
        Traceback (most recent call last):
        equilibria.training.files.DamagedFileError: ...
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{name} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise DamagedFileError(f"{name} is damaged: it holds no keys")
    if data.pop(CHECKSUM, None) != _seal(data):
        raise DamagedFileError(f"{name} is damaged: its checksum is not that of its content")
    return data


def _seal(data: Mapping[str, Any]) -> str:
    return checksum(json.dumps(data, sort_keys=True).encode())


def check_run_file(path: Path, folder: Path) -> None:
    """Refuse what is not a regular file inside the folder of a run.

    A run may come from anywhere. A link could lead to any file, and reading a pipe or a device
    might never end.

    Raises:
        DamagedFileError: If the path leads out of the folder, or is no regular file.
        FileNotFoundError: If there is nothing.
    """
    try:
        place, status = path.resolve(), path.stat()
    except (RuntimeError, OSError) as error:  # RuntimeError: links that lead in a circle.
        if isinstance(error, FileNotFoundError):
            raise
        raise DamagedFileError(f"{path} cannot be read ({error})") from None
    if not place.is_relative_to(folder.resolve()):
        raise DamagedFileError(
            f"{path} is a link to {place}, outside of the run {folder}: put the file itself there"
        )
    if not S_ISREG(status.st_mode):
        raise DamagedFileError(f"{path} is a folder, a pipe or a device, not a file: remove it")


def read_run_text(path: Path, folder: Path) -> bytes:
    """The content of a text file of a run (JSON, YAML), after `check_run_file`.

    Raises:
        DamagedFileError: If it is refused, or has more than `MOST_TEXT` bytes.
    """
    check_run_file(path, folder)
    if (size := path.stat().st_size) > MOST_TEXT:
        raise DamagedFileError(f"{path} has {size:,} bytes, more than the {MOST_TEXT:,} allowed")
    return path.read_bytes()


def save_weights(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Parameters and buffers as a safetensors file, which loads without running any code.

    Examples:
        >>> from pathlib import Path
        >>> model = torch.nn.Linear(2, 2)
        >>> eq.training.save_weights(model, Path("linear.safetensors"))
        >>> eq.training.load_weights(model, Path("linear.safetensors"))
    """
    save_tensors(model.state_dict(), path, metadata)


def save_tensors(
    named: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Tensors as a safetensors file.

    Its metadata hold the checksum of the file, taken with zeros in the place of the checksum.
    """
    from safetensors.torch import save

    # Copies: safetensors refuses a weight that two terms share, which has two names here.
    tensors = {name: value.detach().cpu().clone() for name, value in named.items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    content = _ordered(save(tensors, metadata={**(metadata or {}), CHECKSUM: BLANK}))
    write_atomically(path, content.replace(BLANK.encode(), checksum(content).encode(), 1))


def _ordered(content: bytes) -> bytes:
    """A safetensors file with its metadata in the order of their names.

    The library writes them in an order that differs from process to process, and equal weights
    are to be equal files.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-len(text) % 8 + len(text))  # Tensors begin at multiples of eight bytes.
    return len(text).to_bytes(8, "little") + text + content[start:]


def read_weights(path: Path, most: int | None = None) -> dict[str, Tensor]:
    """What `save_tensors` wrote; a file that has changed since is an error.

    Args:
        path: A regular file.
        most: Bytes that the file may have; None does not limit them.

    Raises:
        DamagedFileError: If the file is not as it was written, or is larger than `most`.

    Examples:
        >>> from equilibria.models.pretrained import pretrained_file
        >>> from equilibria.training.files import read_weights
        >>> weights = read_weights(pretrained_file("digits-opteq"))
        >>> weights["head.classifier.bias"].shape
        torch.Size([10])
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    status = path.stat()
    if not S_ISREG(status.st_mode):
        raise DamagedFileError(f"{path} is a folder, a pipe or a device, not a file: remove it")
    if most is not None and status.st_size > most:
        raise DamagedFileError(
            f"{path} has {status.st_size:,} bytes, but its model has weights of fewer than {most:,}"
        )
    content = path.read_bytes()
    found = re.search(rb'"sha256":"([0-9a-f]{64})"', content)
    if found is not None:
        blank = content[: found.start(1)] + BLANK.encode() + content[found.end(1) :]
        if checksum(blank) != found.group(1).decode():
            raise DamagedFileError(f"{path} is damaged: its checksum is not that of its content")
    try:
        tensors: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from None
    return tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what `save_weights` wrote into a model of the same shape; anything else is an error.

    Examples:
        >>> from pathlib import Path
        >>> one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> eq.training.save_weights(one, Path("one.safetensors"))
        >>> eq.training.load_weights(other, Path("one.safetensors"))
        >>> one.weight.equal(other.weight)
        True
    """
    own = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    # Twice, because weights may have been saved in double precision.
    found = read_weights(path, 2 * own + WEIGHTS_OVERHEAD)
    found.pop(LATENTS, None)
    model.load_state_dict(found)


def take_lock(path: Path, *, wait: bool = False) -> int | None:
    """A lock that ends with its process: a descriptor to close, or None where there are no locks.

    path: a folder, or a file, which is made. `BlockingIOError` if another has it and we do not
    wait.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # Some network file systems have none.
        os.close(descriptor)
        return None
    return descriptor


def release_lock(descriptor: int, owner: int) -> None:
    """Let go of a lock, also of its copies in workers of this process, which is `owner`."""
    import fcntl

    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
