"""Downloads of data sets from a local server, and the command `datasets`."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from equilibria.data import (
    Download,
    DownloadError,
    MissingDataError,
    dataset_card,
    list_datasets,
    load_dataset,
)
from equilibria.data import registry as internals
from equilibria.data.download import download
from tests.data.formats import write_cifar10, write_mnist
from tests.data.server import FileServer, running_server
from tests.program import invoke


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("EQUILIBRIA_DATA", raising=False)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def published(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Download]:
    """Serve small versions of CIFAR-10 and MNIST; return their downloads by path."""
    write_cifar10(tmp_path / "source" / "cifar-10-batches-py")
    write_mnist(tmp_path / "source" / "raw", zipped=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tmp_path / "source" / "cifar-10-batches-py", "cifar-10-batches-py")
    server.files["/cifar-10-python.tar.gz"] = packed.getvalue()
    for path in (tmp_path / "source" / "raw").iterdir():
        server.files[f"/{path.name}"] = path.read_bytes()
    moved = {}
    for name in ("cifar10", "mnist"):
        card = dataset_card(name)
        downloads = []
        for item in card.downloads:
            file = "/" + item.url.rpartition("/")[2]
            digest = hashlib.md5(server.files[file]).hexdigest()
            item = replace(item, url=server.address(file), checksum=f"md5:{digest}")
            downloads.append(item)
            moved[file] = item
        monkeypatch.setitem(internals._cards, name, replace(card, downloads=tuple(downloads)))
    return moved


@pytest.mark.usefixtures("published")
def test_archives_are_unpacked_and_removed(server: FileServer, tmp_path: Path) -> None:
    root = tmp_path / "data"
    assert download("cifar10", root) == root / "cifar-10-batches-py"
    assert len(load_dataset("cifar10", root).train) == 50
    assert [path.name for path in root.iterdir()] == ["cifar-10-batches-py"]
    count = len(server.requests)
    assert download("cifar10", root) == root / "cifar-10-batches-py"
    assert len(server.requests) == count


@pytest.mark.usefixtures("published")
def test_existing_files_are_not_downloaded_again(server: FileServer, tmp_path: Path) -> None:
    first = server.files.pop("/t10k-labels-idx1-ubyte.gz")
    with pytest.raises(DownloadError, match=r"t10k-labels.*404"):
        download("mnist", tmp_path / "data")
    server.files["/t10k-labels-idx1-ubyte.gz"] = first
    server.requests.clear()
    assert download("mnist", tmp_path / "data") == tmp_path / "data" / "MNIST" / "raw"
    assert [path for path, _ in server.requests] == ["/t10k-labels-idx1-ubyte.gz"]
    assert len(load_dataset("mnist", tmp_path / "data").test) == 10


@pytest.mark.usefixtures("published")
def test_existing_uncompressed_files_are_used(server: FileServer, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "MNIST" / "raw"
    write_mnist(folder, zipped=False)
    assert download("mnist", tmp_path / "data") == folder
    assert server.requests == []


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_existing_archive_is_used_if_its_checksum_matches(
    server: FileServer, tmp_path: Path, is_cut: bool
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    whole = server.files["/cifar-10-python.tar.gz"]
    (root / "cifar-10-python.tar.gz").write_bytes(whole[:-100] if is_cut else whole)
    assert download("cifar10", root) == root / "cifar-10-batches-py"
    assert len(server.requests) == is_cut
    assert [path.name for path in root.iterdir()] == ["cifar-10-batches-py"]


@pytest.mark.usefixtures("published")
def test_a_partly_unpacked_archive_is_unpacked_again(server: FileServer, tmp_path: Path) -> None:
    """After an interruption, some files and the archive exist."""
    root = tmp_path / "data"
    (root / "cifar-10-batches-py").mkdir(parents=True)
    (root / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"in part")
    archive = root / "cifar-10-python.tar.gz"
    archive.write_bytes(server.files["/cifar-10-python.tar.gz"])
    download("cifar10", root)
    assert len(load_dataset("cifar10", root).train) == 50
    assert not archive.exists()


@pytest.mark.usefixtures("published")
def test_missing_files_are_restored_from_the_archive(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    download("cifar10", tmp_path / "data")
    (folder / "data_batch_3").unlink()
    (folder / "mine").write_text("stays")
    assert download("cifar10", tmp_path / "data") == folder
    assert (folder / "data_batch_3").exists()
    assert (folder / "mine").read_text() == "stays"


@pytest.mark.usefixtures("published")
def test_the_archive_is_kept_until_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"

    def full(*names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["equilibria.data.download"], "_moves", full)
        with pytest.raises(DownloadError, match=r"cannot unpack.*free some disk"):
            download("cifar10", root)
    assert [path.name for path in root.iterdir()] == ["cifar-10-python.tar.gz"]
    assert download("cifar10", root) == root / "cifar-10-batches-py"


@pytest.mark.usefixtures("published")
def test_a_damaged_file_is_downloaded_again(server: FileServer, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    damaged = folder / "train-labels-idx1-ubyte.gz"
    damaged.write_bytes(b"cut")
    assert download("mnist", tmp_path / "data") == folder
    assert damaged.read_bytes() == server.files["/train-labels-idx1-ubyte.gz"]
    assert len(load_dataset("mnist", tmp_path / "data").train) == 20


@pytest.mark.usefixtures("published")
def test_an_archive_with_another_checksum_is_not_unpacked(
    server: FileServer, tmp_path: Path
) -> None:
    server.files["/cifar-10-python.tar.gz"] += b"!"
    with pytest.raises(DownloadError, match="its checksum is not"):
        download("cifar10", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("name", [n for n in list_datasets() if not dataset_card(n).downloads])
def test_the_error_says_how_to_get_data_that_need_a_registration(name: str, tmp_path: Path) -> None:
    card = dataset_card(name)
    if not card.folders:
        assert download(name) is None
        return
    with pytest.raises(DownloadError) as caught:
        download(name, tmp_path)
    assert card.address in str(caught.value)
    assert card.license in str(caught.value)


def test_a_download_needs_a_folder() -> None:
    with pytest.raises(MissingDataError, match="EQUILIBRIA_DATA"):
        download("mnist")


def test_the_command_lists_data_sets(tmp_path: Path) -> None:
    assert "No folder of data sets is set" in invoke("datasets").output
    write_cifar10(tmp_path / "cifar-10-batches-py")
    lines = invoke("datasets", "--root", tmp_path).output.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    assert set(list_datasets()) <= set(rows)
    assert "cifar-10-batches" in rows["cifar10"]
    assert " no " in rows["mnist"]
    assert "always" in rows["digits"]
    assert "equilibria datasets get mnist" in rows["mnist"]


@pytest.mark.usefixtures("published")
def test_the_command_downloads_data_sets(tmp_path: Path) -> None:
    get = ("datasets", "get", "mnist", "--root", tmp_path / "data")
    assert f"mnist is now in {tmp_path / 'data' / 'MNIST' / 'raw'}" in invoke(*get).output
    assert "mnist was already in" in invoke(*get).output
    assert "needs no files" in invoke("datasets", "get", "digits").output


@pytest.mark.parametrize(
    ("name", "message"), [("imagenet", "image-net.org"), ("minst", "did you mean 'mnist'")]
)
def test_errors_of_the_command_are_one_sentence(tmp_path: Path, name: str, message: str) -> None:
    result = invoke("datasets", "get", name, "--root", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("encoding", [None, "gzip", "x-gzip"])
def test_gzip_files_are_kept_compressed(
    server: FileServer, tmp_path: Path, published: dict[str, Download], encoding: str | None
) -> None:
    """Some servers declare gzip files as encoded plain files; they must not be decoded."""
    server.encoding = encoding
    download("mnist", tmp_path / "data")
    file = tmp_path / "data" / published["/train-images-idx3-ubyte.gz"].target
    assert len(gzip.decompress(file.read_bytes())) == 16 + 20 * 28 * 28
