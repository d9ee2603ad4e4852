"""Archives are unpacked completely, and only inside the target folder."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from equilibria.data import DataFileError, DownloadError
from equilibria.data.download import unpack


def tar(path: Path, *members: tuple[str, bytes, str], mode: str = "w:gz") -> Path:
    """Write a tar file of members (name, content or link target, type)."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = getattr(tarfile, kind)
            if kind == "REGTYPE":
                info.size = len(content)
            else:
                info.linkname = content.decode()
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, *members: tuple[str, bytes, int]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


FILE = stat.S_IFREG | 0o644
GOOD = (("set/a", b"1", "REGTYPE"), ("set/deep/b", b"2", "REGTYPE"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2"])
def test_tar_files_are_unpacked(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "new" / "root"
    unpack(tar(tmp_path / "a.tar", *GOOD, mode=mode), folder)
    assert contents(folder) == {"set/a": b"1", "set/deep/b": b"2"}
    assert [path.name for path in folder.iterdir()] == ["set"]


def test_zip_files_are_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    members = (("set/", b"", stat.S_IFDIR | 0o755), ("set/a", b"1", FILE), ("set/b", b"2", 0))
    unpack(zipped(tmp_path / "a.zip", *members), folder)
    assert contents(folder) == {"set/a": b"1", "set/b": b"2"}


def test_other_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    (tmp_path / "root" / "set").mkdir(parents=True)
    (tmp_path / "root" / "set" / "mine").write_bytes(b"mine")
    (tmp_path / "root" / "set" / "a").write_bytes(b"old")
    unpack(tar(tmp_path / "a.tar", *GOOD), tmp_path / "root")
    expected = {"set/a": b"1", "set/deep/b": b"2", "set/mine": b"mine"}
    assert contents(tmp_path / "root") == expected


BAD_NAMES = ["../out", "set/../../out", "/out", "C:\\out", "..\\out", "\\\\host\\out", "set/.."]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_outside_the_folder_are_rejected(tmp_path: Path, name: str, kind: str) -> None:
    archive = (
        tar(tmp_path / "bad.tar", *GOOD, (name, b"x", "REGTYPE"))
        if kind == "tar"
        else zipped(tmp_path / "bad.zip", ("set/a", b"1", FILE), (name, b"x", FILE))
    )
    with pytest.raises(DataFileError, match=rf"bad\.{kind}: rejected.*outside the target folder"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "CHRTYPE", "FIFOTYPE"])
def test_links_and_devices_in_tar_files_are_rejected(tmp_path: Path, kind: str) -> None:
    archive = tar(tmp_path / "bad.tar", *GOOD, ("set/link", b"../../out", kind))
    with pytest.raises(DataFileError, match=r"bad\.tar: rejected.*link or a device"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_links_in_zip_files_are_rejected(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "bad.zip", ("set/link", b"/etc", stat.S_IFLNK | 0o777))
    with pytest.raises(DataFileError, match="link or a device"):
        unpack(archive, tmp_path / "root")


def test_existing_links_to_outside_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "set").symlink_to(outside)
    with pytest.raises(DataFileError, match="set: is a link to a place outside the target folder"):
        unpack(tar(tmp_path / "a.tar", *GOOD), tmp_path / "root")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("is_folder", [False, True])
def test_conflicts_are_detected_before_files_are_moved(tmp_path: Path, is_folder: bool) -> None:
    """An existing folder has the name of a file of the archive, or vice versa."""
    members = [(f"set/{name}", b"new", "REGTYPE") for name in ("a", "b", "c/d", "e")]
    place = tmp_path / "root" / "set" / ("b" if is_folder else "c")
    place.parent.mkdir(parents=True)
    (place.parent / "a").write_bytes(b"old")
    place.mkdir() if is_folder else place.write_bytes(b"mine")
    before = contents(tmp_path / "root")
    with pytest.raises(DataFileError, match=rf"set/{place.name}: prevents unpacking.*remove it"):
        unpack(tar(tmp_path / "a.tar", *members), tmp_path / "root")
    assert contents(tmp_path / "root") == before


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_truncated_archive_leaves_no_files(tmp_path: Path, mode: str) -> None:
    large = ("set/large", bytes(range(256)) * 400, "REGTYPE")
    archive = tar(tmp_path / "a.tar", *GOOD, large, mode=mode)
    archive.write_bytes(archive.read_bytes()[: -600 if mode == "w:gz" else -60_000])
    with pytest.raises(DataFileError, match=r"a\.tar: cannot be unpacked"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_the_error_names_a_file_that_is_not_an_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_text("<html>not found</html>")
    with pytest.raises(DataFileError, match=r"a\.tgz: cannot be unpacked"):
        unpack(tmp_path / "a.tgz", tmp_path / "root")


def packed(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar or zip file, according to the suffix."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path
    mode = {".tgz": "w:gz", ".xz": "w:xz", ".bz2": "w:bz2", ".tar": "w"}[path.suffix]
    return tar(path, *((name, content, "REGTYPE") for name, content in members.items()), mode=mode)


@pytest.mark.parametrize("suffix", ["tgz", "zip", "xz", "bz2"])
def test_flipped_bits_are_detected_or_harmless(tmp_path: Path, suffix: str) -> None:
    """Either all files are unpacked unchanged, or an error is raised and none is."""
    rng = np.random.default_rng(0)
    members = {f"set/{n}": rng.bytes(40) * 3 + b"text " * 20 for n in range(12)}
    archive = packed(tmp_path / f"a.{suffix}", members)
    good = archive.read_bytes()
    detected = 0
    positions = [*range(24), *rng.integers(0, len(good), 200), *range(len(good) - 24, len(good))]
    for number, position in enumerate(positions):
        damaged = bytearray(good)
        damaged[position] ^= 1 << int(rng.integers(8))
        archive.write_bytes(damaged)
        root = tmp_path / f"root{number}"
        try:
            unpack(archive, root)
        except DataFileError:
            detected += 1
            assert list(root.iterdir()) == []
        else:
            assert contents(root) == members
    assert detected > 100


def test_a_damaged_tar_header_is_not_the_end_of_the_archive(tmp_path: Path) -> None:
    """Tar files have checksums of headers, but not of contents."""
    archive = packed(tmp_path / "a.tar", {f"set/{n}": b"x" * 700 for n in range(10)})
    content = bytearray(archive.read_bytes())
    fifth = content.index(b"set/5")
    content[fifth + 4] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataFileError, match=r"a\.tar: cannot be unpacked \(damaged"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("members", [1, 3])
def test_a_tar_file_truncated_between_members_is_rejected(tmp_path: Path, members: int) -> None:
    archive = packed(tmp_path / "a.tar", {f"set/{n}": b"x" * 512 for n in range(5)})
    archive.write_bytes(archive.read_bytes()[: 1024 * members])
    with pytest.raises(DataFileError, match=r"a\.tar: cannot be unpacked"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def encrypted(path: Path) -> None:
    packed(path, {"set/a": b"secret"})
    content = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + flags] |= 1
    path.write_bytes(content)


def unknown_method(path: Path) -> None:
    packed(path, {"set/a": b"1" * 100})
    content = bytearray(path.read_bytes())
    for mark, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(mark) + method] = 97
    path.write_bytes(content)


INVALID: dict[str, Callable[[Path], object]] = {
    "encrypted.zip": encrypted,
    "unknown.zip": unknown_method,
    "file and folder.tar": lambda path: packed(path, {"a": b"1", "a/b": b"2"}),
    "folder and file.zip": lambda path: packed(path, {"a/b": b"1", "a": b"2"}),
    "long name.tgz": lambda path: packed(path, {"x" * 300: b"1"}),
    "no name.tar": lambda path: packed(path, {"": b"1"}),
    "bad.xz": lambda path: path.write_bytes(b"\xfd7zXZ\x00\x00\x04" + bytes(100)),
    "bad.bz2": lambda path: path.write_bytes(b"BZh91AY&SY" + bytes(100)),
    "empty.tar": lambda path: path.touch(),
    "pipe.tar": os.mkfifo,
    "folder.tar": os.mkdir,
    "nothing.tar": lambda path: None,
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_archives_raise_an_error_with_a_remedy(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    INVALID[kind](path)
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(DataFileError, match="; ") as caught:
        unpack(path, root)
    assert str(caught.value).startswith(f"{path}: ")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("suffix", ["tgz", "zip"])
def test_the_unpacked_size_is_limited(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["equilibria.data.download"], "MAX_BYTES", 1_000_000)
    archive = packed(tmp_path / f"a.{suffix}", {f"set/{n}": bytes(300_000) for n in range(5)})
    with pytest.raises(DataFileError, match="rejected: it holds more than 1,000,000 bytes"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_full_disk_is_a_download_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(tmp_path / "a.tgz", {"set/a": b"1"})

    def full(*names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DownloadError, match=r"cannot unpack .*No space left.*free some disk"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
