"""Files of runs: written atomically, with checksums that detect damage."""

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
MAX_TEXT_BYTES = 2**26
"""Largest size of a text file of a run, enough for the metrics of 100,000 epochs."""
WEIGHTS_OVERHEAD = 2**26
"""Largest number of bytes besides the weights in their file: names and latents of images."""
BLANK = "0" * 64
"""Placeholder of the checksum in a file of weights."""


class DamagedFileError(ValueError):
    """A file of a run was changed since it was written, or is not a regular file of the run."""


def checksum(content: bytes) -> str:
    """Return the SHA-256 checksum of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def checksum_of_file(path: Path) -> str:
    """Return the SHA-256 checksum of a file, which is read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            # Otherwise a crash of the machine could keep the new name but lose the content.
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename != str(path):
            # The error names no file, or the temporary one.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file such that an interruption leaves either the old or the new content.

    Args:
        path: File to write.
        content: New content.

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
    """Return a name in the same folder for this process; `remove_temporary` removes leftovers."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether a path has a name made by `temporary_name`."""
    return re.fullmatch(r"\..+\.\d+\.tmp", path.name) is not None


def remove_temporary(folder: Path) -> None:
    """Remove temporary files of killed processes; no other process may write to the folder."""
    for leftover in filter(is_temporary, folder.glob(".*.tmp")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, on systems that support it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(data: Any, *, indent: int | None = 2) -> str:
    """Convert data to JSON. Dataclasses become objects; NaN and infinity become null.

    Args:
        data: The data.
        indent: Indentation; None for a single line.

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
    """Convert data to JSON with a checksum.

    Args:
        data: The data.
        indent: Indentation; None for a single line.

    Examples:
        >>> from equilibria.training.files import sealed_json, unsealed
        >>> text = sealed_json({"accuracy": 0.5})
        >>> unsealed(text, "an example")
        {'accuracy': 0.5}
    """
    plain = json.loads(json_text(data))
    return json_text({**plain, CHECKSUM: _seal(plain)}, indent=indent)


def unsealed(text: str, name: object) -> dict[str, Any]:
    """Parse the result of `sealed_json` and verify its checksum.

    Args:
        text: The JSON text.
        name: Name of the text in error messages.

    Raises:
        DamagedFileError: If the text is not JSON, or its checksum does not match.

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
        raise DamagedFileError(f"{name} is damaged: it is not a JSON object")
    if data.pop(CHECKSUM, None) != _seal(data):
        raise DamagedFileError(f"{name} is damaged: its checksum does not match its content")
    return data


def _seal(data: Mapping[str, Any]) -> str:
    return checksum(json.dumps(data, sort_keys=True).encode())


def check_run_file(path: Path, folder: Path) -> None:
    """Check that a path is a regular file inside the folder of a run.

    Runs may come from untrusted sources: a link could point to any file, and reading a pipe or a
    device might never end.

    Args:
        path: The file.
        folder: Folder of the run.

    Raises:
        DamagedFileError: If the file is outside the folder, or is not a regular file.
        FileNotFoundError: If it does not exist.
    """
    try:
        target, status = path.resolve(), path.stat()
    except (RuntimeError, OSError) as error:  # RuntimeError: a cycle of links.
        if isinstance(error, FileNotFoundError):
            raise
        raise DamagedFileError(f"{path} cannot be read ({error})") from None
    if not target.is_relative_to(folder.resolve()):
        raise DamagedFileError(
            f"{path} is a link to {target}, outside the run {folder}: replace it by the file"
        )
    if not S_ISREG(status.st_mode):
        raise DamagedFileError(f"{path} is not a file, but a folder, a pipe or a device: remove it")


def read_run_text(path: Path, folder: Path) -> bytes:
    """Read a text file of a run (JSON, YAML) after `check_run_file`.

    Args:
        path: The file.
        folder: Folder of the run.

    Raises:
        DamagedFileError: If the check fails, or the file has more than `MAX_TEXT_BYTES` bytes.
    """
    check_run_file(path, folder)
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise DamagedFileError(
            f"{path} has {size:,} bytes, more than the limit of {MAX_TEXT_BYTES:,}"
        )
    return path.read_bytes()


def save_weights(model: nn.Module, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Save parameters and buffers as a safetensors file, which can be loaded safely.

    Args:
        model: The model.
        path: File to write.
        metadata: Strings to store in the header of the file.

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
    """Save tensors as a safetensors file.

    The metadata contain a checksum of the file, computed with zeros in place of the checksum.
    """
    from safetensors.torch import save

    # Copies, because safetensors rejects shared memory, such as a weight that two terms share.
    tensors = {name: value.detach().cpu().clone() for name, value in named.items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    content = _ordered(save(tensors, metadata={**(metadata or {}), CHECKSUM: BLANK}))
    write_atomically(path, content.replace(BLANK.encode(), checksum(content).encode(), 1))


def _ordered(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file, so that equal weights give equal files.

    The library writes metadata in an order that differs between processes.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-len(text) % 8 + len(text))  # The tensors are aligned to eight bytes.
    return len(text).to_bytes(8, "little") + text + content[start:]


def read_weights(path: Path, most: int | None = None) -> dict[str, Tensor]:
    """Read a file written by `save_tensors`.

    Args:
        path: The file.
        most: Largest size in bytes; None for no limit.

    Raises:
        DamagedFileError: If the file was changed, is larger than `most`, or is not a regular file.

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
        raise DamagedFileError(f"{path} is not a file, but a folder, a pipe or a device: remove it")
    if most is not None and status.st_size > most:
        raise DamagedFileError(
            f"{path} has {status.st_size:,} bytes, but the weights of its model have fewer than "
            f"{most:,}: copy the run again from its origin"
        )
    content = path.read_bytes()
    match = re.search(rb'"sha256":"([0-9a-f]{64})"', content)
    if match is not None:
        blank = content[: match.start(1)] + BLANK.encode() + content[match.end(1) :]
        if checksum(blank) != match.group(1).decode():
            raise DamagedFileError(f"{path} is damaged: its checksum does not match its content")
    try:
        tensors: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from None
    return tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights written by `save_weights` into a model.

    Args:
        model: Model with the same parameters and buffers.
        path: File of weights.

    Raises:
        DamagedFileError: If the file was changed since it was written, or is too large.
        RuntimeError: If the weights do not fit the model.

    Examples:
        >>> from pathlib import Path
        >>> model, copy = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> eq.training.save_weights(model, Path("weights.safetensors"))
        >>> eq.training.load_weights(copy, Path("weights.safetensors"))
        >>> model.weight.equal(copy.weight)
        True
    """
    size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    # Twice, because weights may have been saved in double precision.
    weights = read_weights(path, 2 * size + WEIGHTS_OVERHEAD)
    weights.pop(LATENTS, None)
    model.load_state_dict(weights)


def take_lock(path: Path, *, wait: bool = False) -> int | None:
    """Lock a folder or file until this process ends or releases the lock.

    Args:
        path: Folder, or file, which is created if necessary.
        wait: Whether to wait for another process that holds the lock.

    Returns:
        A file descriptor for `release_lock`, or None if the system has no locks.

    Raises:
        BlockingIOError: If another process holds the lock and `wait` is false.
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
    except OSError:  # Some network file systems have no locks.
        os.close(descriptor)
        return None
    return descriptor


def release_lock(descriptor: int, owner: int) -> None:
    """Close the descriptor of a lock file, and release the lock if this process holds it.

    A forked worker inherits the descriptor, not the lock. It only closes its copy.

    Args:
        descriptor: File descriptor of the lock file.
        owner: Process that took the lock.
    """
    import fcntl

    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
