"""ImageNet and its subsets: `train/` and `val/`, each with one folder a class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError
from equilibria.data.image_files import READING_THREADS, Framing, ImageFiles, image_names
from equilibria.data.registry import DataSetCard, Download, register_dataset
from equilibria.data.source import Source

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENETTE_NAMES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def load_class_folders(
    folder: Path,
    *,
    name: str,
    classes: int | None = None,
    names: dict[str, str] | None = None,
    size: int | Sequence[int] = 224,
    resize: int | None = None,
    threads: int = READING_THREADS,
) -> DataSet[Source]:
    """Images of `size`, cut from the center after the shorter side was scaled to `resize`.

    A class is called what its folder is called, or what `names` says.
    """
    framing = Framing.make(size, resize)
    found = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    if classes is not None and len(found) != classes:
        raise DataFileError(
            folder / "train",
            f"{len(found)} folders of classes, not {classes}",
            "unpack the whole data set there",
        )
    train, test = (_list_part(folder / part, found, framing, threads) for part in ("train", "val"))
    class_names = tuple((names or {}).get(entry, entry) for entry in found)
    return DataSet[Source](name, train, test, class_names, mean=MEAN, std=STD)


def _list_part(folder: Path, classes: list[str], framing: Framing, threads: int) -> ImageFiles:
    strange = {entry.name for entry in folder.iterdir() if entry.is_dir()} - set(classes)
    if strange:
        raise DataFileError(
            folder / min(strange),
            "a class that the training part lacks",
            "sort the images into the folders of their classes, as in train/",
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = image_names(folder / name) if (folder / name).is_dir() else []
        if not images:
            raise DataFileError(
                folder / name, "no images of this class", "unpack the whole data set there"
            )
        paths += [os.path.join(folder, name, image) for image in images]
        labels += [label] * len(images)
    return ImageFiles(tuple(paths), torch.tensor(labels), framing, threads=threads)


TERMS = "ImageNet's terms: non-commercial research and education"
SIGN_UP = "sign in at https://image-net.org/download.php and accept the terms"

register_dataset(
    DataSetCard(
        "imagenette",
        summary="ten easy classes of ImageNet",
        classes=10,
        size="9,469 + 3,925, shorter side 320",
        license="Apache 2.0; the images under ImageNet's terms",
        folders=("imagenette2-320", "imagenette2", "imagenette2-160", "imagenette"),
        contents=("train", "val"),
        address="https://github.com/fastai/imagenette",
        obtain="Get it with `equilibria datasets get imagenette`.",
        downloads=(
            Download(
                "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz",
                "md5:3df6f0d01a2c9592104656642f5e78a3",
                "imagenette2-320",
                unpack_into=".",
            ),
        ),
    ),
    partial(load_class_folders, name="imagenette", classes=10, names=IMAGENETTE_NAMES),
)
register_dataset(
    DataSetCard(
        "imagenet100",
        summary="a hundred classes of ImageNet",
        classes=100,
        size="about 126,700 + 5,000",
        license=TERMS,
        folders=("imagenet100", "imagenet-100", "ImageNet100"),
        contents=("train", "val"),
        address="https://image-net.org/download.php",
        obtain=(
            f"To get ImageNet, {SIGN_UP}; then copy or link the folders of your hundred classes "
            "to imagenet100/train/ and imagenet100/val/."
        ),
    ),
    partial(load_class_folders, name="imagenet100", classes=100),
)
register_dataset(
    DataSetCard(
        "imagenet",
        summary="ImageNet (ILSVRC 2012)",
        classes=1000,
        size="1,281,167 + 50,000",
        license=TERMS,
        folders=("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC"),
        contents=("train", "val"),
        address="https://image-net.org/download.php",
        obtain=(
            f"To get it, {SIGN_UP}; then unpack ILSVRC2012_img_train.tar and "
            "ILSVRC2012_img_val.tar to one folder a class (n01440764 …) in imagenet/train/ and "
            "imagenet/val/."
        ),
    ),
    partial(load_class_folders, name="imagenet", classes=1000),
)
