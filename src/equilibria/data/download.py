"""Getting a data set from its publisher."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from equilibria.data.archives import unpack
from equilibria.data.errors import DataFileError, DownloadError
from equilibria.data.registry import Download, data_root, dataset_card
from equilibria.data.transfer import Progress, fetch_file


def download(
    name: str, root: Path | str | None = None, *, progress: Progress | None = None
) -> Path | None:
    """Bring a data set to `root` (or to what EQUILIBRIA_DATA names), and return its folder.

    What is there already is kept. None for a data set that needs no files. An error for one whose
    license asks for a registration says where to go instead.
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
        _get(item, base, progress)
    found = card.find(base)
    if found is None:
        raise DataFileError(
            base,
            f"{name!r} was downloaded, but its files are not in {' or '.join(card.folders)}",
            "look whether an older copy is in the way",
        )
    return found


def _get(item: Download, base: Path, progress: Progress | None) -> None:
    target = base / item.target
    if target.exists():
        return
    if item.unpack_into is None:
        fetch_file(item.url, target, item.checksum, progress=progress)
        return
    archive = base / Path(urlsplit(item.url).path).name
    if not archive.exists():
        fetch_file(item.url, archive, item.checksum, progress=progress)
    try:
        unpack(archive, base / item.unpack_into)
    except OSError as error:
        raise DownloadError(
            f"cannot unpack {archive}: {error}. Make room, and run it again to go on from there"
        ) from error
    archive.unlink()
