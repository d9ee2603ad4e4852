"""One file over HTTP: resumed where it was cut, checked, and only then given its name."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from equilibria.data.errors import DownloadError

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Told the file's name, the bytes that are here, and the bytes in all if the server says."""

CHUNK = 1 << 18
TIMEOUT = 30.0
ATTEMPTS = 4
PAUSE = 1.0
AGENT = "equilibria"


class _InterruptedError(Exception):
    """The connection ended before the file did."""


class _RefusedError(Exception):
    """The server has no such file, or keeps it to itself."""


def fetch_file(
    url: str,
    path: Path,
    checksum: str,
    *,
    progress: Progress | None = None,
    attempts: int = ATTEMPTS,
    pause: float = PAUSE,
) -> None:
    """Bring `url` to `path`; where the connection is cut, try again after so many seconds.

    What has arrived is kept in `path` with `.part` added, so that a later call goes on from there,
    until the checksum ("md5:…" or "sha256:…") is right.
    """
    if not url.startswith(("https://", "http://")):
        raise DownloadError(f"cannot download {url}: only http and https addresses are read")
    partial = path.with_name(path.name + ".part")
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _continue(url, partial, progress, path.name)
            break
        except _InterruptedError as cut:
            reason = str(cut)
        except _RefusedError as refusal:
            raise DownloadError(
                f"cannot download {url}: {refusal}. If it has moved, put it at {path} yourself"
            ) from refusal
        except OSError as error:
            raise DownloadError(_disk_trouble(partial, error)) from error
    else:
        kept = partial.stat().st_size if partial.exists() else 0
        raise DownloadError(
            f"cannot download {url}: {reason}. {kept:,} bytes are kept: when the network is back, "
            f"run it again to go on from there, or put the file at {path} yourself"
        )
    if not has_checksum(partial, checksum):
        partial.unlink()
        raise DownloadError(
            f"what came from {url} is not the published file: its checksum is not {checksum}. "
            "It was deleted; run it again, and if it happens twice, the file at that address "
            "has changed"
        )
    os.replace(partial, path)


def has_checksum(path: Path, checksum: str) -> bool:
    """Whether a file is the one that "md5:…" or "sha256:…" describes."""
    algorithm, _, digest = checksum.partition(":")
    if algorithm not in ("md5", "sha256"):
        raise ValueError(f"a checksum begins with md5: or sha256:, not {checksum!r}")
    running = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            running.update(chunk)
    return running.hexdigest() == digest.lower()


def _continue(url: str, partial: Path, progress: Progress | None, name: str) -> None:
    """Read on from what is in `partial`; an OSError is one of the disk."""
    here = partial.stat().st_size if partial.exists() else 0
    try:
        answer = _open(url, here)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and here:
                if _length_of_range(error.headers.get("Content-Range")) == here:
                    return
                partial.unlink()
                raise _InterruptedError("the part that was here did not fit the file") from error
            answered = f"the server answers {error.code} {error.reason}"
            if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                raise _RefusedError(answered) from error
            raise _InterruptedError(answered) from error
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(_say(error)) from error
    with answer:
        resumes = answer.headers.get("Content-Range", "").startswith(f"bytes {here}-")
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            here = 0
        elif not resumes:
            partial.unlink()
            raise _InterruptedError("the server sent another part than the one asked for")
        length = answer.headers.get("Content-Length")
        total = here + int(length) if length and length.isdigit() else None
        with partial.open("ab" if here else "wb") as file:
            for chunk in iter(lambda: _read(answer), b""):
                file.write(chunk)
                here += len(chunk)
                if progress is not None:
                    progress(name, here, total)
    if total is not None and here < total:
        raise _InterruptedError(f"the connection ended after {here:,} of {total:,} bytes")


def _open(url: str, start: int) -> Any:
    headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)


def _read(answer: Any) -> bytes:
    try:
        chunk: bytes = answer.read(CHUNK)
    except http.client.IncompleteRead as error:
        return error.partial
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(_say(error)) from error
    return chunk


def _length_of_range(header: str | None) -> int | None:
    """The length of the whole file, from "bytes */1234"."""
    length = (header or "").rpartition("/")[2]
    return int(length) if length.isdigit() else None


def _say(error: BaseException) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def _disk_trouble(partial: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return (
            f"the disk of {partial.parent} is full. What has arrived is kept: make room, and run "
            "it again to go on from there"
        )
    return f"cannot write {partial}: {error}; choose a folder that can be written"
