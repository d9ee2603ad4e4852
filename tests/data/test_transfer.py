"""Downloads of files from a local HTTP server."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from equilibria.data import DataFileError, DownloadError
from equilibria.data.download import fetch_file
from tests.data.formats import random_bytes
from tests.data.server import FileServer, running_server

transfer = sys.modules["equilibria.data.download"]
"""The module; `equilibria.data.download` as an attribute may be its function."""
CONTENT = random_bytes(1_000_000).tobytes()
CHECKSUM = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server() -> Iterator[FileServer]:
    with running_server() as running:
        running.files["/file"] = CONTENT
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "file"


def part_of(path: Path) -> Path:
    return path.with_name("file.part")


def fetch(server: FileServer, path: Path, **options: Any) -> None:
    fetch_file(server.address("/file"), path, CHECKSUM, pause=0, **options)


def test_a_file_is_downloaded_with_progress(server: FileServer, path: Path) -> None:
    reports: list[tuple[str, int, int | None]] = []
    fetch(server, path, progress=lambda *report: reports.append(report))
    assert path.read_bytes() == CONTENT
    assert not part_of(path).exists()
    assert reports[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [count for _, count, _ in reports] == sorted(count for _, count, _ in reports)


def test_md5_checksums_are_supported(server: FileServer, path: Path) -> None:
    digest = hashlib.md5(CONTENT).hexdigest()
    fetch_file(server.address("/file"), path, f"md5:{digest.upper()}")
    assert path.read_bytes() == CONTENT
    path.unlink()
    with pytest.raises(DownloadError, match="its checksum is not crc32:0"):
        fetch_file(server.address("/file"), path, "crc32:0")
    assert list(path.parent.iterdir()) == []


def test_an_interrupted_download_resumes(server: FileServer, path: Path) -> None:
    server.cuts = [300_000, 250_000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert [byte_range for _, byte_range in server.requests] == [
        None,
        "bytes=300000-",
        "bytes=550000-",
    ]


def test_a_later_call_resumes_the_download(server: FileServer, path: Path) -> None:
    server.cuts = [400_000]
    with pytest.raises(DownloadError, match=r"400,000 of 1,000,000 bytes.*400,000 bytes are kept"):
        fetch(server, path, attempts=1)
    assert not path.exists()
    assert part_of(path).read_bytes() == CONTENT[:400_000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.requests[-1][1] == "bytes=400000-"


def test_without_range_support_the_download_restarts(server: FileServer, path: Path) -> None:
    server.knows_ranges = False
    server.cuts = [400_000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_wrong_range_in_the_response_is_rejected(server: FileServer, path: Path) -> None:
    server.cuts = [400_000]
    server.shifts_ranges = True
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_complete_partial_file_is_not_downloaded_again(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENT)
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.requests == [("/file", f"bytes={len(CONTENT)}-")]


def test_a_partial_file_that_is_too_long_is_deleted(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENT + b"more")
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_file_with_a_wrong_checksum_is_deleted(server: FileServer, path: Path) -> None:
    server.files["/file"] = b"x" + CONTENT[1:]
    with pytest.raises(DownloadError, match=r"was deleted because its checksum"):
        fetch(server, path)
    assert list(path.parent.iterdir()) == []


def test_a_partial_file_of_another_file_is_deleted(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    part_of(path).write_bytes(b"?" * 1000)
    with pytest.raises(DownloadError, match="was deleted because its checksum"):
        fetch(server, path)
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_without_a_length_the_checksum_detects_interruptions(
    server: FileServer, path: Path
) -> None:
    server.sends_length = False
    server.cuts = [1000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert [byte_range for _, byte_range in server.requests] == [None, "bytes=1000-"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_another_file_without_a_length_is_rejected(
    server: FileServer, path: Path, is_chunked: bool
) -> None:
    server.sends_length, server.is_chunked = False, is_chunked
    server.files["/file"] = b"another"
    with pytest.raises(DownloadError, match=r"was deleted because its checksum"):
        fetch(server, path)
    assert [byte_range for _, byte_range in server.requests] == [None, "bytes=7-"]
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("cut", [300_000, 305_000])
def test_interrupted_chunked_responses_resume(server: FileServer, path: Path, cut: int) -> None:
    """The connection ends between two chunks, or within a chunk."""
    server.is_chunked = True
    server.cuts = [cut]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert [byte_range for _, byte_range in server.requests] == [None, f"bytes={cut}-"]


def test_a_slow_connection_is_closed(
    server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by a second per call, so that few bytes arrive per minute."""
    clock = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "monotonic", lambda: next(clock))
        patch.setattr(transfer, "CHUNK", 500)
        with pytest.raises(
            DownloadError, match=r"only .* bytes arrived in 60 seconds.*kept.*run the command again"
        ):
            fetch(server, path, attempts=3)
    kept = part_of(path).read_bytes()
    assert 0 < len(kept) <= 3 * 61 * 500, "the bytes of one minute per attempt"
    assert kept == CONTENT[: len(kept)]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.requests[-1][1] == f"bytes={len(kept)}-"


def test_a_slow_header_is_abandoned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes arrive within the timeout, but the header never ends."""
    monkeypatch.setattr(transfer, "RATE_WINDOW", 0.2)
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                    while not is_over.wait(0.02):
                        connection.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/file"
        try:
            with pytest.raises(DownloadError, match=r"did not respond within 0\.2 seconds.*again"):
                fetch_file(address, path, CHECKSUM, attempts=1)
        finally:
            is_over.set()
            dripping.join()


@pytest.mark.parametrize("sends_length", [True, False])
def test_the_size_of_a_download_is_limited(
    server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch, sends_length: bool
) -> None:
    server.sends_length = sends_length
    monkeypatch.setattr(transfer, "MAX_BYTES", 200_000)
    with pytest.raises(DownloadError, match="larger than the limit of 200,000 bytes"):
        fetch(server, path)
    assert len(server.requests) == 1
    assert not path.exists()
    assert part_of(path).stat().st_size <= (0 if sends_length else 200_000) + transfer.CHUNK


def test_an_existing_file_is_kept_only_if_its_checksum_matches(
    server: FileServer, path: Path
) -> None:
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    fetch(server, path)
    assert server.requests == []
    path.write_bytes(CONTENT[:-1])
    fetch(server, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["file", "file.part"])
def test_a_pipe_instead_of_a_file_raises(server: FileServer, path: Path, name: str) -> None:
    path.parent.mkdir()
    os.mkfifo(path.parent / name)
    with pytest.raises(DataFileError, match=f"{name}: .*a pipe.*remove it"):
        fetch(server, path)


def test_server_errors_are_retried(server: FileServer, path: Path) -> None:
    server.errors = [503, 500]
    fetch(server, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [403, 404])
def test_client_errors_are_not_retried(server: FileServer, path: Path, status: int) -> None:
    server.errors = [status] * 4
    with pytest.raises(DownloadError, match=rf"responded {status}.*save it as .*file"):
        fetch(server, path)
    assert len(server.requests) == 1


def test_a_refused_connection_keeps_the_partial_file(path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/file"
        with pytest.raises(DownloadError, match=r"refused.*0 bytes are kept.*run the command"):
            fetch_file(address, path, CHECKSUM, pause=0)


def test_only_http_addresses_are_allowed(tmp_path: Path, path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    with pytest.raises(DownloadError, match="must begin with http or https"):
        fetch_file(secret.as_uri(), path, CHECKSUM)


class FullDisk:
    """File on a disk with `room` free bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self.file = file
        self.room = room

    def write(self, chunk: bytes) -> None:
        self.room -= len(chunk)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.write(chunk)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


def test_a_full_disk_keeps_the_partial_file(
    server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_on_full_disk(self: Path, mode: str = "r", **options: Any) -> Any:
        file = opened(self, mode, **options)
        return FullDisk(file, 600_000) if mode in ("wb", "ab") else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        with pytest.raises(DownloadError, match=r"No space left.*free some disk space"):
            fetch(server, path)
    kept = part_of(path).stat().st_size
    assert 0 < kept <= 600_000
    assert not path.exists()
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.requests[-1][1] == f"bytes={kept}-"


def test_an_unwritable_folder_raises(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file where a folder should be")
    with pytest.raises(DownloadError, match=r"cannot write .*choose a writable folder"):
        fetch(server, tmp_path / "deep" / "file")
