"""Getting a data set from its publisher: downloaded, checked, unpacked.

A file is resumed where it was cut and gets its name only when its checksum is right. An archive is
unpacked whole or not at all, with nothing written outside the folder that was named, and deleted
when all of it is there.
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
"""Told the file's name, the bytes that are here, and the bytes in all if the server says."""

CHUNK = 1 << 16
TIMEOUT = 30.0
"""Seconds without a byte after which a connection is given up."""
PATIENCE, LEAST = 60.0, 60 * 1024
"""In so many seconds at least so many bytes arrive, or the connection is given up too."""
MOST_BYTES = 2**34
"""Of a download, and of what an archive holds: several times the largest that is offered."""
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""Errors that say nothing of an archive."""
HEADERS = {"User-Agent": "equilibria", "Accept-Encoding": "identity"}


class DownloadError(OSError):
    """A download did not arrive."""


def download(
    name: str, root: Path | str | None = None, *, progress: Progress | None = None
) -> Path | None:
    """Bring a data set to `root` (or to what EQUILIBRIA_DATA names), and return its folder.

    What is there already is kept. None for a data set that needs no files. An error for one whose
    license asks for a registration says where to go instead.

    Examples:
        >>> from equilibria.data.download import download
        >>> print(download("digits"))  # comes with the package: there is nothing to fetch
        None
    """
    card = dataset_card(name)
    if not card.folders:
        return None
    base = data_root(root)
    found = card.find(base)
    if found is not None:
        return found
    if not card.downloads:
        raise DownloadError(
            f"{name!r} cannot be downloaded here. {card.obtain} "
            f"The folder of data sets is {base}; license: {card.license}"
        )
    for item in card.downloads:
        if item.unpack_into is None:
            fetch_file(item.url, base / item.target, item.checksum, progress=progress)
            continue
        archive = base / Path(urlsplit(item.url).path).name
        # Something is missing: of one archive, or of one that is left and was unpacked in part.
        is_whole = (base / item.target).exists() and len(card.downloads) > 1
        if archive.exists() or not is_whole:
            fetch_file(item.url, archive, item.checksum, progress=progress)
            unpack(archive, base / item.unpack_into)
            archive.unlink()
    found = card.find(base)
    if found is None:
        raise DataFileError(
            base,
            f"{name!r} was downloaded, but its files are not in {' or '.join(card.folders)}",
            "look whether an older copy is in the way",
        )
    return found


def fetch_file(
    url: str,
    path: Path,
    checksum: str,
    *,
    progress: Progress | None = None,
    attempts: int = 4,
    pause: float = 1.0,
) -> None:
    """Bring `url` to `path`; where the connection is cut, try again after so many seconds.

    What has arrived is kept in `path` with `.part` added, so that a later call goes on from there,
    until the checksum ("md5:…" or "sha256:…") is right. A file that is there already is kept if its
    checksum is right, and replaced if not.
    """
    import pooch

    if not url.startswith(("https://", "http://")):
        raise DownloadError(f"cannot download {url}: only http and https addresses are read")
    part = path.with_name(path.name + ".part")
    for place in (path, part):
        if place.exists():
            check_plain_file(place)

    def downloader(url: str, output_file: str, _: object) -> None:
        """For pooch, which checks what is in `output_file` and then moves it to its place."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(pause)
            reason = _read_on(url, path, part, progress, checksum)
            if reason is None:
                os.replace(part, output_file)
                return
        kept = part.stat().st_size if part.exists() else 0
        raise DownloadError(
            f"cannot download {url}: {reason}. {kept:,} bytes are kept: when the network is back, "
            f"run it again to go on from there, or put the file at {path} yourself"
        )

    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(
            url, known_hash=checksum, fname=path.name, path=path.parent, downloader=downloader
        )
    except ValueError as error:
        raise DownloadError(
            f"what came from {url} is not the published file: its checksum is not {checksum}. "
            "It was deleted; run it again, and if it happens twice, the file at that address "
            "has changed"
        ) from error
    except DownloadError:
        raise
    except OSError as error:
        remedy = "choose a folder that can be written"
        if error.errno == errno.ENOSPC:
            remedy = "what has arrived is kept: make room, and run it again to go on from there"
        raise DownloadError(f"cannot write {path}: {error}; {remedy}") from error


def _read_on(
    url: str, path: Path, part: Path, progress: Progress | None, checksum: str
) -> str | None:
    """Read on from what is in `part`; None once all is there, or why the connection ended."""
    import requests
    from pooch.hashes import hash_matches
    from urllib3.exceptions import HTTPError

    here = part.stat().st_size if part.exists() else 0
    wanted = {"Range": f"bytes={here}-"} if here else {}
    try:
        answer = _in_time(
            partial(requests.get, url, headers={**HEADERS, **wanted}, stream=True, timeout=TIMEOUT)
        )
    except Empty:
        return f"no whole answer came in {PATIENCE:g} seconds"
    except requests.RequestException as error:
        # The innermost of the errors that are wrapped in each other says what happened.
        cause = getattr(error.args[0] if error.args else None, "reason", error)
        return str(cause).rpartition("): ")[2]
    with answer:
        extent = answer.headers.get("Content-Range", "")
        if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and here:
            if extent.rpartition("/")[2] == str(here):
                return None
            part.unlink()
            return "the part that was here did not fit the file"
        if not answer.ok:
            reason = f"the server answers {answer.status_code} {answer.reason}"
            if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                return reason
            raise DownloadError(
                f"cannot download {url}: {reason}. If it has moved, put it at {path} yourself"
            )
        if answer.status_code != HTTPStatus.PARTIAL_CONTENT:
            here = 0
        elif not extent.startswith(f"bytes {here}-"):
            part.unlink()
            return "the server sent another part than the one asked for"
        length = answer.headers.get("Content-Length", "")
        total = here + int(length) if length.isdigit() else None
        of_all = f" of {total:,}" if total is not None else ""
        began, in_time = monotonic(), 0
        with part.open("ab" if here else "wb") as file:
            try:
                # What has arrived, as it was published: a file that is compressed stays so.
                while chunk := answer.raw.read1(CHUNK, decode_content=False):
                    file.write(chunk)
                    here += len(chunk)
                    in_time += len(chunk)
                    if max(here, total or 0) > MOST_BYTES:
                        raise DownloadError(
                            f"cannot download {url}: it is larger than {MOST_BYTES:,} bytes, as "
                            f"no data set here is. Delete {part}, and look what is there"
                        )
                    if progress is not None:
                        progress(path.name, here, total)
                    if monotonic() - began > PATIENCE:
                        if in_time < LEAST:
                            return (
                                f"only {in_time:,} bytes came in a minute, {here:,}{of_all} so far"
                            )
                        began, in_time = monotonic(), 0
            except HTTPError:
                return f"the connection ended after {here:,}{of_all} bytes"
    if total is None and not hash_matches(str(part), checksum):
        # Without a length, an end looks like a cut: it is asked for more.
        return f"the connection ended after {here:,} bytes, which are not the published file"
    return None


def _in_time(ask: Callable[[], requests.Response]) -> requests.Response:
    """What is answered within `PATIENCE`: a server can make a header last by sending it slowly."""
    answers: SimpleQueue[requests.Response | Exception] = SimpleQueue()

    def put_answer() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    # Left alone if it takes too long; a program does not wait for it at its end.
    Thread(target=put_answer, daemon=True).start()
    answer = answers.get(timeout=PATIENCE)
    if isinstance(answer, Exception):
        raise answer
    return answer


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip file into `folder`.

    All of it arrives or nothing does: it is unpacked beside its place, to its end, where the
    checksum of a compressed one is, and moved there at last. An archive with links, devices, or
    names that lead elsewhere is refused; a file that is there already is replaced.
    """
    check_plain_file(archive)
    size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
            for name, is_plain, content in _members(archive):
                path = PureWindowsPath(name)
                if path.anchor or ".." in path.parts or "\0" in name:
                    raise DataFileError(archive, f"refused: its member {name!r} leads out")
                if not is_plain:
                    raise DataFileError(archive, f"refused: {name!r} is a link or a device")
                place = Path(scratch) / name
                (place if content is None else place.parent).mkdir(parents=True, exist_ok=True)
                if content is None:
                    continue
                with place.open("wb") as file:
                    while chunk := content.read(CHUNK):
                        size += file.write(chunk)
                        if size > MOST_BYTES:
                            raise DataFileError(
                                archive, f"refused: it holds more than {MOST_BYTES:,} bytes"
                            )
            # All of them are known, and possible, before the first is made.
            for unpacked, place in list(_moves(Path(scratch), folder)):
                os.replace(unpacked, place)
    except DataFileError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_DISK:
            raise DownloadError(
                f"cannot unpack {archive}: {error}. Make room, and run it again to go on from there"
            ) from error
        # Damaged archives raise nearly anything.
        raise DataFileError(archive, f"cannot be unpacked ({error})") from error


class _TarMember(tarfile.TarInfo):
    """Of which a broken one is an error; to `tarfile` it is the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _TarMember:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf.count(0) == tarfile.BLOCKSIZE:
                raise
            raise tarfile.ReadError(f"damaged or cut off: {error}") from error


def _members(archive: Path) -> Iterator[tuple[str, bool, IO[bytes] | None]]:
    """The name of each member, whether it is a plain file or folder, and what is in a file."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                # The upper half holds the kind of file where the archive comes from Unix.
                kind = S_IFMT(entry.external_attr >> 16)
                is_plain = kind in (0, S_IFREG) or S_ISDIR(kind)
                with zipped.open(entry) as content:
                    yield entry.filename, is_plain, None if entry.is_dir() else content
        return
    with tarfile.open(archive, tarinfo=_TarMember) as packed:
        for member in packed:
            inside = packed.extractfile(member) if member.isfile() else None
            yield member.name, member.isfile() or member.isdir(), inside
        while packed.fileobj is not None and packed.fileobj.read(CHUNK):
            pass


def _moves(scratch: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """From where to where what was unpacked goes; whole folders at once where none is there yet."""
    for entry in scratch.iterdir():
        place = folder / entry.name
        if entry.is_dir() and place.is_dir():
            if place.is_symlink() and not place.resolve().is_relative_to(folder.resolve()):
                raise DataFileError(
                    place, "a link that leads out of the folder", "remove it, then unpack again"
                )
            yield from _moves(entry, place)
        elif place.is_dir() or (entry.is_dir() and os.path.lexists(place)):
            raise DataFileError(
                place, "in the way of what is unpacked", "remove it, then unpack again"
            )
        else:
            yield entry, place
