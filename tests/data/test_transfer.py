"""Files over HTTP, from a server on this machine."""

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
"""The module, whose name in the window is that of its function."""
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


def test_a_file_arrives_and_its_progress_is_told(server: FileServer, path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    fetch(server, path, progress=lambda *news: told.append(news))
    assert path.read_bytes() == CONTENT
    assert not part_of(path).exists()
    assert told[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [here for _, here, _ in told] == sorted(here for _, here, _ in told)


def test_md5_is_known_too(server: FileServer, path: Path) -> None:
    digest = hashlib.md5(CONTENT).hexdigest()
    fetch_file(server.address("/file"), path, f"md5:{digest.upper()}")
    assert path.read_bytes() == CONTENT
    path.unlink()
    with pytest.raises(DownloadError, match="its checksum is not crc32:0"):
        fetch_file(server.address("/file"), path, "crc32:0")
    assert list(path.parent.iterdir()) == []


def test_a_cut_connection_goes_on_where_it_was(server: FileServer, path: Path) -> None:
    server.cuts = [300_000, 250_000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=300000-", "bytes=550000-"]


def test_a_later_call_goes_on_too(server: FileServer, path: Path) -> None:
    server.cuts = [400_000]
    with pytest.raises(DownloadError, match=r"400,000 of 1,000,000 bytes.*400,000 bytes are kept"):
        fetch(server, path, attempts=1)
    assert not path.exists()
    assert part_of(path).read_bytes() == CONTENT[:400_000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1][1] == "bytes=400000-"


def test_a_server_without_ranges_starts_again(server: FileServer, path: Path) -> None:
    server.knows_ranges = False
    server.cuts = [400_000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_server_that_sends_another_range_is_not_believed(server: FileServer, path: Path) -> None:
    server.cuts = [400_000]
    server.shifts_ranges = True
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_complete_part_is_not_fetched_again(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENT)
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.asked == [("/file", f"bytes={len(CONTENT)}-")]


def test_a_part_that_is_too_long_is_thrown_away(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENT + b"more")
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server: FileServer, path: Path) -> None:
    server.files["/file"] = b"x" + CONTENT[1:]
    with pytest.raises(DownloadError, match=r"not the published file.*deleted"):
        fetch(server, path)
    assert list(path.parent.iterdir()) == []


def test_a_part_of_another_file_leaves_nothing(server: FileServer, path: Path) -> None:
    path.parent.mkdir()
    part_of(path).write_bytes(b"?" * 1000)
    with pytest.raises(DownloadError, match="not the published file"):
        fetch(server, path)
    fetch(server, path)
    assert path.read_bytes() == CONTENT


def test_a_cut_is_noticed_by_the_checksum_without_a_length(server: FileServer, path: Path) -> None:
    server.says_length = False
    server.cuts = [1000]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=1000-"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_another_file_without_a_length_is_asked_for_more_and_refused(
    server: FileServer, path: Path, is_chunked: bool
) -> None:
    server.says_length, server.is_chunked = False, is_chunked
    server.files["/file"] = b"another"
    with pytest.raises(DownloadError, match=r"not the published file.*deleted"):
        fetch(server, path)
    assert [wanted for _, wanted in server.asked] == [None, "bytes=7-"]
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("cut", [300_000, 305_000])
def test_chunks_that_are_cut_go_on_where_they_were(
    server: FileServer, path: Path, cut: int
) -> None:
    """Between two chunks, and within one."""
    server.is_chunked = True
    server.cuts = [cut]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={cut}-"]


def test_a_connection_that_drips_is_given_up(
    server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a second goes by at every look: a minute has few looks, and few bytes."""
    clock = itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "monotonic", lambda: next(clock))
        patch.setattr(transfer, "CHUNK", 500)
        with pytest.raises(
            DownloadError, match=r"only .* bytes came in a minute.*kept.*run it again"
        ):
            fetch(server, path, attempts=3)
    kept = part_of(path).read_bytes()
    assert 0 < len(kept) <= 3 * 61 * 500, "a minute's bytes an attempt"
    assert kept == CONTENT[: len(kept)]
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1][1] == f"bytes={len(kept)}-"


def test_a_header_that_drips_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes soon enough, and the header never ends."""
    monkeypatch.setattr(transfer, "PATIENCE", 0.2)
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
            with pytest.raises(DownloadError, match=r"no whole answer came in 0\.2 seconds.*again"):
                fetch_file(address, path, CHECKSUM, attempts=1)
        finally:
            is_over.set()
            dripping.join()


@pytest.mark.parametrize("says_length", [True, False])
def test_a_download_that_does_not_end_is_given_up(
    server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch, says_length: bool
) -> None:
    server.says_length = says_length
    monkeypatch.setattr(transfer, "MOST_BYTES", 200_000)
    with pytest.raises(DownloadError, match="larger than 200,000 bytes"):
        fetch(server, path)
    assert len(server.asked) == 1
    assert not path.exists()
    assert part_of(path).stat().st_size <= (0 if says_length else 200_000) + transfer.CHUNK


def test_what_is_there_is_kept_if_its_checksum_is_right_and_replaced_if_not(
    server: FileServer, path: Path
) -> None:
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    fetch(server, path)
    assert server.asked == []
    path.write_bytes(CONTENT[:-1])
    fetch(server, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["file", "file.part"])
def test_a_pipe_in_the_place_of_a_file_is_refused(
    server: FileServer, path: Path, name: str
) -> None:
    path.parent.mkdir()
    os.mkfifo(path.parent / name)
    with pytest.raises(DataFileError, match=f"{name}: .*a pipe.*remove it"):
        fetch(server, path)


def test_a_busy_server_is_asked_again(server: FileServer, path: Path) -> None:
    server.errors = [503, 500]
    fetch(server, path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_is_told_at_once(server: FileServer, path: Path, status: int) -> None:
    server.errors = [status] * 4
    with pytest.raises(DownloadError, match=rf"answers {status}.*put it at .*file yourself"):
        fetch(server, path)
    assert len(server.asked) == 1


def test_without_a_network(path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/file"
        with pytest.raises(DownloadError, match=r"refused.*0 bytes are kept.*run it again"):
            fetch_file(address, path, CHECKSUM, pause=0)


def test_only_web_addresses_are_read(tmp_path: Path, path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    with pytest.raises(DownloadError, match="only http and https"):
        fetch_file(secret.as_uri(), path, CHECKSUM)


class FullDisk:
    """A file that takes `room` bytes."""

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


def test_a_full_disk(server: FileServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def open_on_full_disk(self: Path, mode: str = "r", **options: Any) -> Any:
        file = opened(self, mode, **options)
        return FullDisk(file, 600_000) if mode in ("wb", "ab") else file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_full_disk)
        with pytest.raises(DownloadError, match=r"No space left.*kept: make room"):
            fetch(server, path)
    kept = part_of(path).stat().st_size
    assert 0 < kept <= 600_000
    assert not path.exists()
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1][1] == f"bytes={kept}-"


def test_a_folder_that_cannot_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file where a folder should be")
    with pytest.raises(DownloadError, match=r"cannot write .*choose a folder"):
        fetch(server, tmp_path / "deep" / "file")
