"""Archives are unpacked whole, and only where they should be."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from equilibria.data import DataFileError
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
