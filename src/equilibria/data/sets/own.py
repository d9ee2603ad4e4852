"""Images of the user: one folder per class, or a table of files and labels."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equilibria.data.file_sources import READING_THREADS, ImageFiles
from equilibria.data.finding import is_image, list_folders
from equilibria.data.readers import DataFileError, read_bytes
from equilibria.data.source import DataSet, Selection, Source, stratified_split
from equilibria.images import Framing

PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Parts of a data set by the names of their folders."""
COLUMNS = {
    "file": ("file", "filename", "file_name", "path", "filepath", "file_path", "image"),
    "label": ("label", "class", "category", "target"),
    "split": ("split", "part", "set", "subset"),
}
"""Accepted names of the columns of a table."""
TEST_SHARE, TEST_SEED = 0.2, 20210325
"""Share of every class that is held out if there is no test part; the same for all runs."""
TABLE_SUFFIXES = (".csv", ".tsv")


@dataclass(frozen=True)
class Listing:
    """List of the images in a folder or a table; the images have not been read.

    Attributes:
        paths: Image files.
        labels: Class of each image, shape (images,).
        class_names: Names of the classes.
        parts: Part of each image: "train", "validation" or "test".
        others: Number of files that are not images, by suffix.
    """

    paths: tuple[str, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    parts: tuple[str, ...]
    others: Counter[str]

    def indices(self, part: str) -> Tensor:
        """Return the indices of the images of a part."""
        return torch.tensor([i for i, p in enumerate(self.parts) if p == part], dtype=torch.long)

    @property
    def held_out(self) -> str:
        """Part to test on: "test" or else "validation"; an empty string if there is neither."""
        return next((part for part in ("test", "validation") if part in self.parts), "")


def list_own_images(folder: Path, labels: str | None = None) -> Listing:
    """List the images of a folder with their classes.

    Args:
        folder: Folder of images, with one folder per class.
        labels: Table (CSV) in the folder that lists files and labels; the folders inside then do
            not matter.

    Raises:
        DataFileError: If there are no images, fewer than two classes, or a file is missing.

    Examples:
        >>> from pathlib import Path
        >>> for kind in ("cats", "dogs"):
        ...     Path("pets", kind).mkdir(parents=True)
        ...     eq.data.image_from_tensor(torch.rand(3, 4, 4)).save(Path("pets", kind, "a.png"))
        >>> from equilibria.data.sets.own import list_own_images
        >>> list_own_images(Path("pets")).class_names
        ('cats', 'dogs')
    """
    if labels is not None:
        return _list_table(folder / labels)
    return _list_folder(folder)


def load_own_images(
    folder: Path,
    *,
    labels: str | None = None,
    labelled: bool = True,
    size: int | Sequence[int] | None = None,
    resize: int | None = None,
    gray: bool = False,
    test: float | None = None,
    threads: int = READING_THREADS,
) -> DataSet:
    """Load images of the user. Images that cannot be read are skipped with a warning.

    Args:
        folder: Folder of images, with one folder per class. It may have parts above the classes,
            such as `train/` and `test/`.
        labels: Table (CSV) in the folder that lists files and labels.
        labelled: False uses all images at any depth, without classes.
        size: Size that images are scaled and cropped to: a side, or height and width.
        resize: Length to which the shorter side is scaled before the crop.
        gray: Whether images have one channel instead of three.
        test: Share of every class that is held out for tests, the same images in every run. Only
            for folders without a test or validation part.
        threads: Number of threads that decode images.
    """
    if labels is not None and not labelled:
        raise ValueError(
            "data.options.labels cannot be used with labelled=false: remove one of the options"
        )
    listing = list_own_images(folder, labels) if labelled else _list_unlabelled(folder)
    if test is not None and listing.held_out:
        raise ValueError(
            f"{folder} has a part {listing.held_out!r} to test on: remove data.options.test"
        )
    framing = Framing.make(size, resize)
    images = ImageFiles(
        listing.paths, listing.labels, framing, gray, threads, skips_unreadable=True
    )
    parts: dict[str, Source] = {
        part: Selection(images, listing.indices(part)) for part in set(listing.parts)
    }
    if not listing.held_out:
        share = TEST_SHARE if test is None else test
        parts["train"], parts["test"] = stratified_split(parts["train"], share, TEST_SEED, least=1)
    elif "test" not in parts:
        parts["test"] = parts.pop("validation")
    return DataSet(
        name=(folder / labels).stem if labels else folder.resolve().name,
        class_names=listing.class_names,
        kind="classification" if labelled else "unlabelled",
        framing=framing,
        license="yours",
        **parts,  # type: ignore[arg-type]
    )


def _list_folder(folder: Path) -> Listing:
    others: Counter[str] = Counter()
    entries: list[tuple[str, str, str]] = []
    inside = _visible(folder)
    parts = {entry: PARTS.get(entry.name.lower(), "") for entry in inside}
    in_parts = (
        "train" in parts.values()
        and all(parts.values())
        and any(_visible(entry) for entry, part in parts.items() if part == "train")
    )
    if in_parts:
        for entry, part in parts.items():
            for kind in _visible(entry):
                entries += [(path, kind.name, part) for path in _images_below(kind, others)]
    else:
        for kind in inside:
            entries += [(path, kind.name, "train") for path in _images_below(kind, others)]
    if not entries:
        raise DataFileError(
            folder,
            "no folder in it holds images",
            "sort them into one folder per class, or pass a table with the columns file and label",
        )
    return _listing(folder, entries, others)


def _list_unlabelled(folder: Path) -> Listing:
    others: Counter[str] = Counter()
    paths = tuple(_images_below(folder, others))
    if not paths:
        raise DataFileError(folder, "there is no image in it", "pass a folder of images")
    labels = torch.zeros(len(paths), dtype=torch.long)
    return Listing(paths, labels, ("picture",), ("train",) * len(paths), others)


def _visible(folder: Path) -> list[Path]:
    """Return the folders in a folder, except hidden ones and metadata of archives from a Mac."""
    return [entry for entry in list_folders(folder) if not _is_hidden(entry.name)]


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _images_below(folder: Path, others: Counter[str]) -> Iterable[str]:
    """Yield the images at any depth, sorted by name, and count other files."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in sorted(files):
            if _is_hidden(name):
                continue
            if is_image(name):
                yield os.path.join(parent, name)
            else:
                others[os.path.splitext(name)[1].lower() or name] += 1


def _list_table(table: Path) -> Listing:
    text = read_bytes(table).decode("utf-8-sig", errors="surrogateescape")
    lines = text.splitlines()
    separator = max(",;\t", key=lambda mark: lines[0].count(mark)) if lines else ","
    try:
        cells_of = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    except csv.Error as error:
        raise DataFileError(table, f"not a table ({error})", "save it as CSV") from None
    rows = [
        (number, [cell.strip() for cell in cells])
        for number, cells in enumerate(cells_of, start=1)
        if any(cell.strip() for cell in cells)
    ]
    positions = {"file": 0, "label": 1}
    if rows and not is_image(rows[0][1][0]):
        heading = [cell.lower() for cell in rows.pop(0)[1]]
        named = {
            column: next((heading.index(name) for name in names if name in heading), None)
            for column, names in COLUMNS.items()
        }
        positions |= {column: index for column, index in named.items() if index is not None}
    entries, missing = [], []
    for number, row in rows:
        cells = {column: row[index] for column, index in positions.items() if index < len(row)}
        part = PARTS.get(cells.get("split", "").lower() or "train")
        if not cells.get("file") or not cells.get("label") or part is None:
            raise DataFileError(
                table,
                f"line {number} must have a file and a label"
                + (f", and one of {', '.join(PARTS)}" if "split" in positions else ""),
                "complete the line",
            )
        path = str(table.parent / cells["file"])
        entries.append((path, cells["label"], part))
        if not os.path.isfile(path):
            missing.append(f"{cells['file']} (line {number})")
    if missing:
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise DataFileError(
            table,
            f"{missing[0]}{more} of {len(entries)} files are missing",
            f"paths are relative to {table.parent}: put the files there, or remove the lines",
        )
    if not entries:
        raise DataFileError(table, "it lists no images", "add lines with a file and a label")
    return _listing(table, entries, Counter())


def _listing(place: Path, entries: list[tuple[str, str, str]], others: Counter[str]) -> Listing:
    """Make the listing of entries (path, class, part)."""
    trained = {kind for _, kind, part in entries if part == "train"}
    untrained = sorted({kind for _, kind, _ in entries} - trained)
    if untrained:
        raise DataFileError(
            place,
            f"the class {_text(untrained[0])!r} has no training images",
            "add training images to every class",
        )
    # Sort numbers by value: 2 before 10.
    is_numbered = all(kind.isdecimal() for kind in trained)
    kinds = sorted(trained, key=(lambda kind: (int(kind), kind)) if is_numbered else str)
    if len(kinds) < 2:
        raise DataFileError(
            place,
            f"there is only one class ({_text(kinds[0])})",
            "add a second class",
        )
    number = {kind: label for label, kind in enumerate(kinds)}
    return Listing(
        paths=tuple(path for path, _, _ in entries),
        labels=torch.tensor([number[kind] for _, kind, _ in entries]),
        class_names=tuple(map(_text, kinds)),
        parts=tuple(part for _, _, part in entries),
        others=others,
    )


def _text(name: str) -> str:
    """Replace bytes that are not valid text in a name."""
    return name.encode(errors="surrogateescape").decode(errors="replace")
