"""Data sets of image files: ImageNet and its subsets, faces without labels, labelled streets.

`about` is what a data set's files do not say of it, from the catalog.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equilibria.data.file_sources import READING_THREADS, ImageFiles, SegmentedFiles
from equilibria.data.finding import is_image, list_folders, list_images
from equilibria.data.readers import DataFileError, MissingDataError, incomplete, read_lines
from equilibria.data.source import DataSet
from equilibria.images import Framing

CELEBA_PARTS = {"0": "train", "1": "validation", "2": "test"}
FFHQ_FOLDERS = ("images1024x1024", "thumbnails128x128")
FFHQ_TRAINING = 60_000
"""The first 60,000 are to train on, as the authors recommend; the rest validate."""


def load_class_folders(
    folder: Path,
    *,
    size: int | Sequence[int] = 224,
    resize: int | None = None,
    threads: int = READING_THREADS,
    classes: int | None = None,
    names: dict[str, str] | None = None,
    about: dict[str, Any],
) -> DataSet:
    """`train/` and `val/`, each with one folder a class: images of `size`, cut from the center.

    Before that the shorter side is scaled to `resize`. A class is called what its folder is called,
    or what `names` says.
    """
    framing = Framing.make(size, resize)
    found = [entry.name for entry in list_folders(folder / "train")]
    if classes is not None and len(found) != classes:
        raise incomplete(folder / "train", f"{len(found)} folders of classes, not {classes}")

    def read(part: Path) -> ImageFiles:
        strange = {entry.name for entry in list_folders(part)} - set(found)
        if strange:
            raise DataFileError(
                part / min(strange),
                "a class that the training part lacks",
                "sort the images into the folders of their classes, as in train/",
            )
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(found):
            images = list_images(part / name) if (part / name).is_dir() else []
            if not images:
                raise incomplete(part / name, "no images of this class")
            paths += map(str, images)
            labels += [label] * len(images)
        return ImageFiles(tuple(paths), torch.tensor(labels), framing, threads=threads)

    return DataSet(
        train=read(folder / "train"),
        test=read(folder / "val"),
        class_names=tuple((names or {}).get(entry, entry) for entry in found),
        framing=framing,
        **about,
    )


def load_celeba(
    folder: Path,
    *,
    size: int | Sequence[int] = 64,
    threads: int = READING_THREADS,
    about: dict[str, Any],
) -> DataSet:
    """The aligned faces, in the parts of `list_eval_partition.txt`."""
    listing, images = folder / "list_eval_partition.txt", folder / "img_align_celeba"
    parts: dict[str, list[str]] = {part: [] for part in CELEBA_PARTS.values()}
    for number, line in enumerate(read_lines(listing), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[1] not in CELEBA_PARTS or Path(words[0]).name != words[0]:
            raise DataFileError(listing, f"line {number} is not a file's name and 0, 1 or 2")
        parts[CELEBA_PARTS[words[1]]].append(os.path.join(images, words[0]))
    if not parts["train"] or not parts["test"]:
        raise DataFileError(listing, "names no images to train on, or none to test on")
    return _unlabelled(parts, size, threads, about)


def load_ffhq(
    folder: Path,
    *,
    size: int | Sequence[int] = 128,
    threads: int = READING_THREADS,
    about: dict[str, Any],
) -> DataSet:
    """The faces of `images1024x1024/`, or else `thumbnails128x128/`; the last 10,000 to test on."""
    held = next((folder / name for name in FFHQ_FOLDERS if (folder / name).is_dir()), None)
    if held is None:
        raise MissingDataError(f"{folder} has neither {' nor '.join(FFHQ_FOLDERS)}")
    paths = [path for piece in (held, *list_folders(held)) for path in list_images(piece)]
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for path in paths:
        if not path.stem.isdigit():
            raise DataFileError(
                path, "not named by a number", "keep FFHQ's own names (00000.png …)"
            )
        parts["train" if int(path.stem) < FFHQ_TRAINING else "test"].append(str(path))
    if not all(parts.values()):
        train, test = map(len, parts.values())
        raise incomplete(held, f"{train} images below {FFHQ_TRAINING}, {test} from there on")
    return _unlabelled(parts, size, threads, about)


def _unlabelled(
    parts: dict[str, list[str]], size: int | Sequence[int], threads: int, about: dict[str, Any]
) -> DataSet:
    framing = Framing.make(size)
    read: dict[str, Any] = {
        part: ImageFiles(
            tuple(paths), torch.zeros(len(paths), dtype=torch.long), framing, threads=threads
        )
        for part, paths in parts.items()
        if paths
    }
    return DataSet(framing=framing, **read, **about)


def load_streets(
    folder: Path,
    *,
    size: int | Sequence[int] | None = None,
    gray: bool = False,
    threads: int = READING_THREADS,
    parts: dict[str, str],
    images: str,
    maps: dict[str, str],
    values: Sequence[int],
    about: dict[str, Any],
) -> DataSet:
    """Images with a map of labels each: CamVid, Cityscapes.

    `images` is the pattern of the image files of a part, and `maps` says what to replace in an
    image's path to get to its map. A pixel of the value `values[label]` has that label.
    """
    framing = Framing.make(size)
    classes = torch.full((256,), about["ignore_index"])
    classes[list(values)] = torch.arange(len(values))

    def read(part: str) -> SegmentedFiles:
        found = sorted(path for path in folder.glob(images.format(part=part)) if is_image(path))
        if not found:
            raise incomplete(folder / images.format(part=part), "no images there")
        places = []
        for path in found:
            place = path.relative_to(folder).as_posix()
            for old, new in maps.items():
                place = place.replace(old.format(part=part), new.format(part=part))
            if not (folder / place).is_file():
                raise MissingDataError(
                    f"{folder / place} is missing: every image needs its map of labels"
                )
            places.append(folder / place)
        return SegmentedFiles(tuple(found), tuple(places), framing, classes, threads, gray)

    read_parts: dict[str, Any] = {name: read(part) for name, part in parts.items()}
    return DataSet(framing=framing, **read_parts, **about)
