"""Data sets of image files: ImageNet and subsets, faces, photographs, segmented street scenes.

The argument `about` has the fields of `DataSet` that the files do not contain, from the catalog.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equilibria.data.file_sources import READING_THREADS, ImageFiles, SegmentedFiles
from equilibria.data.finding import is_image, list_folders, list_images
from equilibria.data.image_files import read_image
from equilibria.data.readers import DataFileError, MissingDataError, incomplete, read_lines
from equilibria.data.source import DataSet, Split
from equilibria.images import Framing

CELEBA_PARTS = {"0": "train", "1": "validation", "2": "test"}
FFHQ_FOLDERS = ("images1024x1024", "thumbnails128x128")
FFHQ_TRAINING = 60_000
"""Number of training images, the first ones, as the authors recommend."""


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
    """Load images from `train/` and `val/`, each with one folder per class.

    Args:
        folder: Folder of the data set.
        size: Size of the crop from the center: a side, or height and width.
        resize: Length to which the shorter side is scaled before the crop.
        threads: Number of threads that decode images.
        classes: Expected number of classes.
        names: Class names by folder; by default the names of the folders.
        about: Fields of `DataSet` that the files do not contain, such as its name.
    """
    framing = Framing.make(size, resize)
    folders = [entry.name for entry in list_folders(folder / "train")]
    if classes is not None and len(folders) != classes:
        raise incomplete(
            folder / "train", f"has {len(folders)} folders of classes, expected {classes}"
        )

    def read(part: Path) -> ImageFiles:
        unknown = {entry.name for entry in list_folders(part)} - set(folders)
        if unknown:
            raise DataFileError(
                part / min(unknown),
                "there is no such class in the training part",
                "sort the images into the folders of their classes, as in train/",
            )
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(folders):
            images = list_images(part / name) if (part / name).is_dir() else []
            if not images:
                raise incomplete(part / name, "there are no images of this class")
            paths += map(str, images)
            labels += [label] * len(images)
        return ImageFiles(tuple(paths), torch.tensor(labels), framing, threads=threads)

    return DataSet(
        train=read(folder / "train"),
        test=read(folder / "val"),
        class_names=tuple((names or {}).get(entry, entry) for entry in folders),
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
    """Load the aligned faces of CelebA in the parts of `list_eval_partition.txt`."""
    listing, images = folder / "list_eval_partition.txt", folder / "img_align_celeba"
    parts: dict[str, list[str]] = {part: [] for part in CELEBA_PARTS.values()}
    for number, line in enumerate(read_lines(listing), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[1] not in CELEBA_PARTS or Path(words[0]).name != words[0]:
            raise DataFileError(listing, f"line {number} must be a file name and 0, 1 or 2")
        parts[CELEBA_PARTS[words[1]]].append(os.path.join(images, words[0]))
    if not parts["train"] or not parts["test"]:
        raise DataFileError(listing, "it lists no training images or no test images")
    return _unlabelled(parts, size, threads, about)


def load_ffhq(
    folder: Path,
    *,
    size: int | Sequence[int] = 128,
    threads: int = READING_THREADS,
    about: dict[str, Any],
) -> DataSet:
    """Load FFHQ from `images1024x1024/` or `thumbnails128x128/`; the last 10,000 are for tests."""
    images = next((folder / name for name in FFHQ_FOLDERS if (folder / name).is_dir()), None)
    if images is None:
        raise MissingDataError(f"{folder} has neither {' nor '.join(FFHQ_FOLDERS)}")
    paths = [path for part in (images, *list_folders(images)) for path in list_images(part)]
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for path in paths:
        if not path.stem.isdigit():
            raise DataFileError(
                path, "its name is not a number", "keep the original names (00000.png …)"
            )
        parts["train" if int(path.stem) < FFHQ_TRAINING else "test"].append(str(path))
    if not all(parts.values()):
        train, test = map(len, parts.values())
        raise incomplete(
            images, f"has {train} images below number {FFHQ_TRAINING} and {test} from there on"
        )
    return _unlabelled(parts, size, threads, about)


def load_photographs(
    folder: Path,
    *,
    gray: bool = False,
    part: str,
    count: int,
    held_out: int | None = None,
    about: dict[str, Any],
) -> DataSet:
    """Load photographs of two orientations; those in portrait format are transposed.

    Args:
        folder: Folder of the data set.
        gray: Whether to convert to one channel, as Pillow does.
        part: Folder of the photographs in `folder`.
        count: Expected number of photographs.
        held_out: Number of photographs, evenly spread in the order of their names, that are held
            out for choices, as validation and test part. None makes all photographs test images.
        about: Fields of `DataSet` that the files do not contain, such as its name.
    """
    paths = list_images(folder / part)
    if len(paths) != count:
        raise incomplete(folder / part, f"has {len(paths)} photographs, expected {count}")
    images = [read_image(path, is_gray=gray) for path in paths]
    landscape = [image.mT if image.shape[1] > image.shape[2] else image for image in images]
    for path, image in zip(paths, landscape, strict=True):
        if image.shape != landscape[0].shape:
            raise DataFileError(
                path,
                f"has shape {tuple(image.shape)}, but {paths[0]} has {tuple(landscape[0].shape)}",
                "replace it with the original file",
            )
    stacked = torch.stack(landscape)
    every = Split(stacked, torch.zeros(count, dtype=torch.long))
    places = torch.arange(count)
    if held_out is None:
        return DataSet(train=every.subset(places[:0]), test=every, **about)
    is_held_out = (places + 1) * held_out // count > places * held_out // count
    chosen_on = every.subset(places[is_held_out])
    train = every.subset(places[~is_held_out])
    return DataSet(train=train, validation=chosen_on, test=chosen_on, **about)


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
    """Load images with label maps, such as CamVid and Cityscapes.

    Args:
        folder: Folder of the data set.
        size: Size that images and maps are scaled and cropped to: a side, or height and width.
        gray: Whether images have one channel instead of three.
        threads: Number of threads that decode images.
        parts: Name in the paths of each part of the data set.
        images: Glob pattern of the image files, with the placeholder `{part}`.
        maps: Replacements that turn the path of an image into that of its map.
        values: `values[label]` is the value of pixels with this label in a map.
        about: Fields of `DataSet` that the files do not contain, such as its name.
    """
    framing = Framing.make(size)
    classes = torch.full((256,), about["ignore_index"])
    classes[list(values)] = torch.arange(len(values))

    def read(part: str) -> SegmentedFiles:
        paths = sorted(path for path in folder.glob(images.format(part=part)) if is_image(path))
        if not paths:
            raise incomplete(folder / images.format(part=part), "there are no images")
        map_paths = []
        for path in paths:
            name = path.relative_to(folder).as_posix()
            for old, new in maps.items():
                name = name.replace(old.format(part=part), new.format(part=part))
            if not (folder / name).is_file():
                raise MissingDataError(f"{folder / name} is missing: every image needs a label map")
            map_paths.append(folder / name)
        return SegmentedFiles(tuple(paths), tuple(map_paths), framing, classes, threads, gray)

    read_parts: dict[str, Any] = {name: read(part) for name, part in parts.items()}
    return DataSet(framing=framing, **read_parts, **about)
