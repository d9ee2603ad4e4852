"""Images of your own: a folder with one folder a class, or a table of files and their labels."""

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
"""What a part may be called."""
COLUMNS = {
    "file": ("file", "filename", "file_name", "path", "filepath", "file_path", "image"),
    "label": ("label", "class", "category", "target"),
    "split": ("split", "part", "set", "subset"),
}
"""What the columns of a table may be called."""
TEST_SHARE, TEST_SEED = 0.2, 20210325
"""Of every class, where nobody said what to test on; the same images for all runs."""
TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class Listing:
    """The images that a folder or a table names; nothing of them has been read."""

    paths: tuple[str, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    parts: tuple[str, ...]
    """For each image "train", "validation" or "test"."""
    others: Counter[str]
    """How many files were passed over, by how their names end."""

    def indices(self, part: str) -> Tensor:
        """The images of a part."""
        return torch.tensor([i for i, p in enumerate(self.parts) if p == part], dtype=torch.long)

    @property
    def held_out(self) -> str:
        """The part to test on: "test", else "validation"; "" if there is neither."""
        return next((part for part in ("test", "validation") if part in self.parts), "")


def list_own_images(folder: Path, labels: str | None = None) -> Listing:
    """The images of a folder, sorted into classes by folders, or by the table `labels` in it.

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
    """Images of your own, brought to `size` as those of other data sets are.

    What is called test is tested on, or else what is called validation; without either, the share
    `test` of every class, always the same images. An image that cannot be read is left out.

    labelled: False takes all images at any depth, as images without classes.
    """
    if labels is not None and not labelled:
        raise ValueError("a table of labels is for labelled images: remove one of both")
    listing = list_own_images(folder, labels) if labelled else _list_unlabelled(folder)
    if test is not None and listing.held_out:
        raise ValueError(f"{folder} says what to test on: remove data.options.test")
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
    found: list[tuple[str, str, str]] = []
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
                found += [(path, kind.name, part) for path in _images_below(kind, others)]
    else:
        for kind in inside:
            found += [(path, kind.name, "train") for path in _images_below(kind, others)]
    if not found:
        raise DataFileError(
            folder,
            "no folder in it holds images",
            "sort them into one folder a class, or name a table with the columns file and label",
        )
    return _listing(folder, found, others)


def _list_unlabelled(folder: Path) -> Listing:
    others: Counter[str] = Counter()
    paths = tuple(_images_below(folder, others))
    if not paths:
        raise DataFileError(folder, "there is no image in it", "name a folder of images")
    labels = torch.zeros(len(paths), dtype=torch.long)
    return Listing(paths, labels, ("picture",), ("train",) * len(paths), others)


def _visible(folder: Path) -> list[Path]:
    """The folders in a folder, but hidden ones and what archives of a Mac bring along."""
    return [entry for entry in list_folders(folder) if not _is_hidden(entry.name)]


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _images_below(folder: Path, others: Counter[str]) -> Iterable[str]:
    """All images at any depth, by name; other files are counted."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in sorted(files):
            if _is_hidden(name):
                continue
            if is_image(name):
                yield os.path.join(place, name)
            else:
                others[os.path.splitext(name)[1].lower() or name] += 1


def _list_table(table: Path) -> Listing:
    text = read_bytes(table).decode("utf-8-sig", errors="surrogateescape")
    lines = text.splitlines()
    separator = max(",;\t", key=lambda mark: lines[0].count(mark)) if lines else ","
    try:
        cells_of = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    except csv.Error as error:
        raise DataFileError(table, f"not a table ({error})", "write it as CSV") from None
    rows = [
        (number, [cell.strip() for cell in cells])
        for number, cells in enumerate(cells_of, start=1)
        if any(cell.strip() for cell in cells)
    ]
    places = {"file": 0, "label": 1}
    if rows and not is_image(rows[0][1][0]):
        heading = [cell.lower() for cell in rows.pop(0)[1]]
        named = {
            column: next((heading.index(name) for name in names if name in heading), None)
            for column, names in COLUMNS.items()
        }
        places |= {column: place for column, place in named.items() if place is not None}
    found, missing = [], []
    for number, row in rows:
        cells = {column: row[place] for column, place in places.items() if place < len(row)}
        part = PARTS.get(cells.get("split", "").lower() or "train")
        if not cells.get("file") or not cells.get("label") or part is None:
            raise DataFileError(
                table,
                f"line {number} is not a file and a label"
                + (f", and one of {', '.join(PARTS)}" if "split" in places else ""),
                "give every line both",
            )
        path = str(table.parent / cells["file"])
        found.append((path, cells["label"], part))
        if not os.path.isfile(path):
            missing.append(f"{cells['file']} (line {number})")
    if missing:
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise DataFileError(
            table,
            f"{missing[0]}{more} of {len(found)} files are not there",
            f"paths count from {table.parent}: put the files there, or remove the lines",
        )
    if not found:
        raise DataFileError(table, "it names no images", "give every line a file and a label")
    return _listing(table, found, Counter())


def _listing(place: Path, found: list[tuple[str, str, str]], others: Counter[str]) -> Listing:
    """Of (path, class, part) one an image."""
    trained = {kind for _, kind, part in found if part == "train"}
    strange = sorted({kind for _, kind, _ in found} - trained)
    if strange:
        raise DataFileError(
            place,
            f"no image of the class {_text(strange[0])!r} is to train on",
            "give every class images to train on",
        )
    # Numbers in the order of numbers.
    is_numbered = all(kind.isdecimal() for kind in trained)
    kinds = sorted(trained, key=(lambda kind: (int(kind), kind)) if is_numbered else str)
    if len(kinds) < 2:
        raise DataFileError(
            place,
            f"all images are of one class ({_text(kinds[0])})",
            "there is nothing to tell apart: add a second class",
        )
    number = {kind: label for label, kind in enumerate(kinds)}
    return Listing(
        paths=tuple(path for path, _, _ in found),
        labels=torch.tensor([number[kind] for _, kind, _ in found]),
        class_names=tuple(map(_text, kinds)),
        parts=tuple(part for _, _, part in found),
        others=others,
    )


def _text(name: str) -> str:
    """A name that may hold bytes which are no text."""
    return name.encode(errors="surrogateescape").decode(errors="replace")
