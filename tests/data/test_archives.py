"""Archives are unpacked whole, and only where they should be."""

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
    """Members of a name, what is in them or what they link to, and their kind."""
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
def test_tar(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "new" / "root"
    unpack(tar(tmp_path / "a.tar", *GOOD, mode=mode), folder)
    assert contents(folder) == {"set/a": b"1", "set/deep/b": b"2"}
    assert [path.name for path in folder.iterdir()] == ["set"]


def test_zip(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    members = (("set/", b"", stat.S_IFDIR | 0o755), ("set/a", b"1", FILE), ("set/b", b"2", 0))
    unpack(zipped(tmp_path / "a.zip", *members), folder)
    assert contents(folder) == {"set/a": b"1", "set/b": b"2"}


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "root" / "set").mkdir(parents=True)
    (tmp_path / "root" / "set" / "mine").write_bytes(b"mine")
    (tmp_path / "root" / "set" / "a").write_bytes(b"old")
    unpack(tar(tmp_path / "a.tar", *GOOD), tmp_path / "root")
    expected = {"set/a": b"1", "set/deep/b": b"2", "set/mine": b"mine"}
    assert contents(tmp_path / "root") == expected


BAD_NAMES = ["../out", "set/../../out", "/out", "C:\\out", "..\\out", "\\\\host\\out", "set/.."]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    archive = (
        tar(tmp_path / "bad.tar", *GOOD, (name, b"x", "REGTYPE"))
        if kind == "tar"
        else zipped(tmp_path / "bad.zip", ("set/a", b"1", FILE), (name, b"x", FILE))
    )
    with pytest.raises(DataFileError, match=rf"bad\.{kind}: refused.*leads out"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "CHRTYPE", "FIFOTYPE"])
def test_links_and_devices_in_tar_are_refused(tmp_path: Path, kind: str) -> None:
    archive = tar(tmp_path / "bad.tar", *GOOD, ("set/link", b"../../out", kind))
    with pytest.raises(DataFileError, match=r"bad\.tar: refused.*link or a device"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_links_in_zip_are_refused(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "bad.zip", ("set/link", b"/etc", stat.S_IFLNK | 0o777))
    with pytest.raises(DataFileError, match="link or a device"):
        unpack(archive, tmp_path / "root")


def test_a_link_that_is_there_is_not_followed_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "set").symlink_to(outside)
    with pytest.raises(DataFileError, match="set: a link that leads out"):
        unpack(tar(tmp_path / "a.tar", *GOOD), tmp_path / "root")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_in_the_way_is_named_before_anything_is_moved(
    tmp_path: Path, is_folder: bool
) -> None:
    """A folder where a file is to be, or a file where a folder is to be."""
    members = [(f"set/{name}", b"new", "REGTYPE") for name in ("a", "b", "c/d", "e")]
    place = tmp_path / "root" / "set" / ("b" if is_folder else "c")
    place.parent.mkdir(parents=True)
    (place.parent / "a").write_bytes(b"old")
    place.mkdir() if is_folder else place.write_bytes(b"mine")
    before = contents(tmp_path / "root")
    with pytest.raises(DataFileError, match=rf"set/{place.name}: in the way.*remove it"):
        unpack(tar(tmp_path / "a.tar", *members), tmp_path / "root")
    assert contents(tmp_path / "root") == before


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_cut_archive_leaves_nothing(tmp_path: Path, mode: str) -> None:
    large = ("set/large", bytes(range(256)) * 400, "REGTYPE")
    archive = tar(tmp_path / "a.tar", *GOOD, large, mode=mode)
    archive.write_bytes(archive.read_bytes()[: -600 if mode == "w:gz" else -60_000])
    with pytest.raises(DataFileError, match=r"a\.tar: cannot be unpacked"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_what_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tgz").write_text("<html>not found</html>")
    with pytest.raises(DataFileError, match=r"a\.tgz: cannot be unpacked"):
        unpack(tmp_path / "a.tgz", tmp_path / "root")


def packed(path: Path, members: dict[str, bytes]) -> Path:
    """A tar or zip file, by its suffix."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path
    mode = {".tgz": "w:gz", ".xz": "w:xz", ".bz2": "w:bz2", ".tar": "w"}[path.suffix]
    return tar(path, *((name, content, "REGTYPE") for name, content in members.items()), mode=mode)


@pytest.mark.parametrize("suffix", ["tgz", "zip", "xz", "bz2"])
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path: Path, suffix: str) -> None:
    """What is unpacked is what was packed, all of it, or there is an error and nothing."""
    chance = np.random.default_rng(0)
    members = {f"set/{n}": chance.bytes(40) * 3 + b"text " * 20 for n in range(12)}
    archive = packed(tmp_path / f"a.{suffix}", members)
    good = archive.read_bytes()
    noticed = 0
    places = [*range(24), *chance.integers(0, len(good), 200), *range(len(good) - 24, len(good))]
    for number, place in enumerate(places):
        spoilt = bytearray(good)
        spoilt[place] ^= 1 << int(chance.integers(8))
        archive.write_bytes(spoilt)
        root = tmp_path / f"root{number}"
        try:
            unpack(archive, root)
        except DataFileError:
            noticed += 1
            assert list(root.iterdir()) == []
        else:
            assert contents(root) == members
    assert noticed > 100


def test_a_header_that_is_damaged_is_not_the_end(tmp_path: Path) -> None:
    """A tar file has no checksum of what is in it, but one of every header."""
    archive = packed(tmp_path / "a.tar", {f"set/{n}": b"x" * 700 for n in range(10)})
    content = bytearray(archive.read_bytes())
    fifth = content.index(b"set/5")
    content[fifth + 4] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataFileError, match=r"a\.tar: cannot be unpacked \(damaged"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("members", [1, 3])
def test_a_tar_file_that_is_cut_between_members_is_not_whole(tmp_path: Path, members: int) -> None:
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


ODD: dict[str, Callable[[Path], object]] = {
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


@pytest.mark.parametrize("kind", ODD)
def test_odd_archives_are_refused_with_a_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    ODD[kind](path)
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(DataFileError, match="; ") as caught:
        unpack(path, root)
    assert str(caught.value).startswith(f"{path}: ")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("suffix", ["tgz", "zip"])
def test_an_archive_that_swells_is_given_up(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["equilibria.data.download"], "MOST_BYTES", 1_000_000)
    archive = packed(tmp_path / f"a.{suffix}", {f"set/{n}": bytes(300_000) for n in range(5)})
    with pytest.raises(DataFileError, match="refused: it holds more than 1,000,000 bytes"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_full_disk_is_not_blamed_on_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = packed(tmp_path / "a.tgz", {"set/a": b"1"})

    def full(*names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(DownloadError, match=r"cannot unpack .*No space left.*Make room"):
        unpack(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
