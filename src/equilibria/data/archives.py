"""Unpacking, with nothing written outside the folder that was named."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from stat import S_IFMT, S_IFREG, S_ISDIR
from typing import IO

from equilibria.data.errors import DataFileError


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip file into `folder`.

    All of it arrives or nothing does: it is unpacked beside its place and moved there at the end.
    An archive with links, devices, or names that lead elsewhere is refused; a file that is there
    already is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
        try:
            _write_all(archive, Path(scratch))
        except (EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
            raise DataFileError(archive, f"cannot be unpacked ({error})") from error
        _merge(Path(scratch), folder)


def _write_all(archive: Path, folder: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                # The upper half holds the kind of file where the archive comes from Unix.
                kind = S_IFMT(entry.external_attr >> 16)
                is_plain = kind in (0, S_IFREG) or S_ISDIR(kind)
                with _place(archive, folder, entry.filename, is_plain, entry.is_dir()) as place:
                    if place is not None:
                        with zipped.open(entry) as content:
                            shutil.copyfileobj(content, place)
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            is_plain = member.isfile() or member.isdir()
            with _place(archive, folder, member.name, is_plain, member.isdir()) as place:
                if place is not None and (inside := packed.extractfile(member)) is not None:
                    shutil.copyfileobj(inside, place)


@contextmanager
def _place(
    archive: Path, folder: Path, name: str, is_plain: bool, is_folder: bool
) -> Iterator[IO[bytes] | None]:
    """Where a member of the archive is to be written; None for a folder."""
    path, windows_path = PurePosixPath(name), PureWindowsPath(name)
    if (
        path.is_absolute()
        or windows_path.drive
        or windows_path.root
        or ".." in windows_path.parts
        or "\0" in name
    ):
        raise DataFileError(archive, f"refused: its member {name!r} leads out of the folder")
    if not is_plain:
        raise DataFileError(archive, f"refused: its member {name!r} is a link or a device")
    target = folder / path
    if is_folder:
        target.mkdir(parents=True, exist_ok=True)
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        yield file


def _merge(scratch: Path, folder: Path) -> None:
    """Move what was unpacked to its place; whole folders at once where none is there yet."""
    for entry in scratch.iterdir():
        place = folder / entry.name
        if entry.is_dir() and place.is_dir():
            if place.is_symlink() and not place.resolve().is_relative_to(folder.resolve()):
                raise DataFileError(
                    place, "a link that leads out of the folder", "remove it, then unpack again"
                )
            _merge(entry, place)
        else:
            os.replace(entry, place)
