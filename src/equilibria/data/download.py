"""Download of data sets from their publishers: transfer, verification, unpacking.

Interrupted downloads are resumed, and a file gets its final name only after its checksum matches.
Archives are unpacked completely or not at all, never outside the target folder, and then deleted.
"""

from __future__ import annotations

import errno
import os
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path, PureWindowsPath
from queue import Empty, SimpleQueue
from stat import S_IFMT, S_IFREG, S_ISDIR
from threading import Thread
from time import monotonic
from typing import IO, TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from equilibria.data.readers import DataFileError, check_plain_file
from equilibria.data.registry import data_root, dataset_card

if TYPE_CHECKING:
    import requests

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Callback with a file name, the bytes received, and the total bytes if the server sends them."""

CHUNK = 1 << 16
TIMEOUT = 30.0
"""Seconds without a byte after which a connection is closed."""
RATE_WINDOW, MIN_WINDOW_BYTES = 60.0, 60 * 1024
"""A connection is also closed if fewer than `MIN_WINDOW_BYTES` arrive in `RATE_WINDOW` seconds."""
MAX_BYTES = 2**34
"""Largest size of a download and of the content of an archive, several times the largest in the
catalog."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Error codes that concern the disk, not the archive that is unpacked."""
HEADERS = {"User-Agent": "equilibria", "Accept-Encoding": "identity"}


class DownloadError(OSError):
    """A download failed."""


def download(
    name: str, root: Path | str | None = None, *, progress: Progress | None = None
) -> Path | None:
    """Download a data set; files that are already there are kept.

    Args:
        name: Name of the data set.
        root: Folder of all data sets; by default the environment variable EQUILIBRIA_DATA.
        progress: Callback for progress.

    Returns:
        The folder of the data set, or None if it needs no files.

    Raises:
        DownloadError: If the download fails, or its license requires a registration. The message
            then says where to register.

    Examples:
        >>> from equilibria.data.download import download
        >>> print(download("digits"))  # comes with scikit-learn
        None
    """
    card = dataset_card(name)
    if not card.folders:
        return None
    base = data_root(root)
    existing = card.find(base)
    if existing is not None:
        return existing
    if not card.downloads:
        raise DownloadError(
            f"{name!r} cannot be downloaded automatically. {card.obtain} "
            f"The folder of data sets is {base}; license: {card.license}"
        )
    for item in card.downloads:
        if item.unpack_into is None:
            fetch_file(item.url, base / item.target, item.checksum, progress=progress)
            continue
        archive = base / Path(urlsplit(item.url).path).name
        # Files are missing. If there are several archives, those that are unpacked are kept. An
        # archive that still exists was not unpacked to its end.
        is_complete = (base / item.target).exists() and len(card.downloads) > 1
        if archive.exists() or not is_complete:
            fetch_file(item.url, archive, item.checksum, progress=progress)
            unpack(archive, base / item.unpack_into)
            archive.unlink()
    folder = card.find(base)
    if folder is None:
        raise DataFileError(
            base,
            f"{name!r} was downloaded, but its files are not in {' or '.join(card.folders)}",
            "remove older copies of the data set, then download it again",
        )
    return folder


def fetch_file(
    url: str,
    path: Path,
    checksum: str,
    *,
    progress: Progress | None = None,
    attempts: int = 4,
    pause: float = 1.0,
) -> None:
    """Download a file and verify its checksum.

    Received bytes are kept in `path` with `.part` added, and a later call resumes there. A file
    that exists is kept if its checksum matches, and replaced otherwise.

    Args:
        url: Address of the file, http or https.
        path: Path to write.
        checksum: "md5:…" or "sha256:…".
        progress: Callback for progress.
        attempts: Number of attempts if the connection is interrupted.
        pause: Seconds between attempts.

    Raises:
        DownloadError: If the download fails or the checksum does not match.
    """
    import pooch

    if not url.startswith(("https://", "http://")):
        raise DownloadError(f"cannot download {url}: the address must begin with http or https")
    part = path.with_name(path.name + ".part")
    for file in (path, part):
        if file.exists():
            check_plain_file(file)

    def downloader(url: str, output_file: str, _: object) -> None:
        """Download for pooch, which verifies `output_file` and then moves it to `path`."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(pause)
            reason = _resume(url, path, part, progress, checksum)
            if reason is None:
                os.replace(part, output_file)
                return
        kept = part.stat().st_size if part.exists() else 0
        raise DownloadError(
            f"cannot download {url}: {reason}. {kept:,} bytes are kept: run the command again to "
            f"resume, or save the file as {path}"
        )

    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(
            url, known_hash=checksum, fname=path.name, path=path.parent, downloader=downloader
        )
    except ValueError as error:
        raise DownloadError(
            f"the file from {url} was deleted because its checksum is not {checksum}. Run the "
            "command again; if the error repeats, the published file has changed"
        ) from error
    except DownloadError:
        raise
    except OSError as error:
        remedy = "choose a writable folder"
        if error.errno == errno.ENOSPC:
            remedy = "free some disk space and run the command again to resume"
        raise DownloadError(f"cannot write {path}: {error}; {remedy}") from error


def _resume(
    url: str, path: Path, part: Path, progress: Progress | None, checksum: str
) -> str | None:
    """Append the rest of the file to `part`; return why the connection ended, None if complete."""
    import requests
    from pooch.hashes import hash_matches
    from urllib3.exceptions import HTTPError

    received = part.stat().st_size if part.exists() else 0
    byte_range = {"Range": f"bytes={received}-"} if received else {}
    try:
        response = _with_deadline(
            partial(
                requests.get, url, headers={**HEADERS, **byte_range}, stream=True, timeout=TIMEOUT
            )
        )
    except Empty:
        return f"the server did not respond within {RATE_WINDOW:g} seconds"
    except requests.RequestException as error:
        # Errors are nested; the innermost one describes the cause.
        cause = getattr(error.args[0] if error.args else None, "reason", error)
        return str(cause).rpartition("): ")[2]
    with response:
        extent = response.headers.get("Content-Range", "")
        if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and received:
            if extent.rpartition("/")[2] == str(received):
                return None
            part.unlink()
            return "the partial file did not match the published file"
        if not response.ok:
            reason = f"the server responded {response.status_code} {response.reason}"
            if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                return reason
            raise DownloadError(
                f"cannot download {url}: {reason}. If the file has moved, save it as {path}"
            )
        if response.status_code != HTTPStatus.PARTIAL_CONTENT:
            received = 0
        elif not extent.startswith(f"bytes {received}-"):
            part.unlink()
            return "the server did not send the requested part of the file"
        length = response.headers.get("Content-Length", "")
        total = received + int(length) if length.isdigit() else None
        of_total = f" of {total:,}" if total is not None else ""
        window_start, window_bytes = monotonic(), 0
        with part.open("ab" if received else "wb") as file:
            try:
                # Without decoding, compressed files stay as they were published.
                while chunk := response.raw.read1(CHUNK, decode_content=False):
                    file.write(chunk)
                    received += len(chunk)
                    window_bytes += len(chunk)
                    if max(received, total or 0) > MAX_BYTES:
                        raise DownloadError(
                            f"cannot download {url}: it is larger than the limit of "
                            f"{MAX_BYTES:,} bytes. Delete {part} and check the address"
                        )
                    if progress is not None:
                        progress(path.name, received, total)
                    if monotonic() - window_start > RATE_WINDOW:
                        if window_bytes < MIN_WINDOW_BYTES:
                            return (
                                f"only {window_bytes:,} bytes arrived in {RATE_WINDOW:g} seconds, "
                                f"{received:,}{of_total} so far"
                            )
                        window_start, window_bytes = monotonic(), 0
            except HTTPError:
                return f"the connection ended after {received:,}{of_total} bytes"
    if total is None and not hash_matches(str(part), checksum):
        # Without a length, the end of the file and an interruption are the same: request the rest.
        return f"the connection ended after {received:,} bytes, which are not the published file"
    return None


def _with_deadline(request: Callable[[], requests.Response]) -> requests.Response:
    """Send a request; raise `Empty` after `RATE_WINDOW` seconds.

    The timeout of requests is per byte, so that a server could send its header forever.
    """
    results: SimpleQueue[requests.Response | Exception] = SimpleQueue()

    def send() -> None:
        try:
            results.put(request())
        except Exception as error:
            results.put(error)

    # A daemon thread does not keep the program alive if the request never ends.
    Thread(target=send, daemon=True).start()
    result = results.get(timeout=RATE_WINDOW)
    if isinstance(result, Exception):
        raise result
    return result


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip file completely or not at all.

    The archive is unpacked to its end, which verifies the checksum of a compressed one, into a
    temporary folder inside `folder`. Its members are then moved; existing files are replaced.

    Args:
        archive: Archive file.
        folder: Folder to unpack into.

    Raises:
        DataFileError: If the archive is damaged, or has links, devices, or paths outside `folder`.
        DownloadError: If the files cannot be written.
    """
    check_plain_file(archive)
    size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
            for name, is_plain, content in _members(archive):
                path = PureWindowsPath(name)
                if path.anchor or ".." in path.parts or "\0" in name:
                    raise DataFileError(
                        archive, f"rejected: its member {name!r} is outside the target folder"
                    )
                if not is_plain:
                    raise DataFileError(
                        archive, f"rejected: its member {name!r} is a link or a device"
                    )
                target = Path(scratch) / name
                (target if content is None else target.parent).mkdir(parents=True, exist_ok=True)
                if content is None:
                    continue
                with target.open("wb") as file:
                    while chunk := content.read(CHUNK):
                        size += file.write(chunk)
                        if size > MAX_BYTES:
                            raise DataFileError(
                                archive, f"rejected: it holds more than {MAX_BYTES:,} bytes"
                            )
            # The list checks every move before the first one is made.
            for unpacked, target in list(_moves(Path(scratch), folder)):
                os.replace(unpacked, target)
    except DataFileError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise DownloadError(
                f"cannot unpack {archive}: {error}. Make the folder writable or free some disk "
                "space, and run the command again"
            ) from error
        # Damaged archives raise almost any exception.
        raise DataFileError(archive, f"cannot be unpacked ({error})") from error


class _TarMember(tarfile.TarInfo):
    """Member whose damaged header raises; `tarfile` would take it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _TarMember:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf.count(0) == tarfile.BLOCKSIZE:
                raise
            raise tarfile.ReadError(f"damaged or truncated: {error}") from error


def _members(archive: Path) -> Iterator[tuple[str, bool, IO[bytes] | None]]:
    """Yield the name of each member, whether it is a plain file or folder, and a file's content."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                # Archives from Unix store the file mode in the upper half.
                kind = S_IFMT(entry.external_attr >> 16)
                is_plain = kind in (0, S_IFREG) or S_ISDIR(kind)
                with zipped.open(entry) as content:
                    yield entry.filename, is_plain, None if entry.is_dir() else content
        return
    with tarfile.open(archive, tarinfo=_TarMember) as packed:
        for member in packed:
            inside = packed.extractfile(member) if member.isfile() else None
            yield member.name, member.isfile() or member.isdir(), inside
        # Reading to the end makes the decompressor verify its checksum.
        while packed.fileobj is not None and packed.fileobj.read(CHUNK):
            pass


def _moves(scratch: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (source, target) of the moves; new folders are moved as a whole."""
    for entry in scratch.iterdir():
        target = folder / entry.name
        if entry.is_dir() and target.is_dir():
            if target.is_symlink() and not target.resolve().is_relative_to(folder.resolve()):
                raise DataFileError(
                    target,
                    "is a link to a place outside the target folder",
                    "remove it, then unpack again",
                )
            yield from _moves(entry, target)
        elif target.is_dir() or (entry.is_dir() and os.path.lexists(target)):
            raise DataFileError(
                target,
                "prevents unpacking: a file and a folder have the same name",
                "remove it, then unpack again",
            )
        else:
            yield entry, target
