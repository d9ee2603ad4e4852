"""Data sets that are read into memory: digits, MNIST's format, CIFAR and CIFAR-10-C.

The argument `about` has the fields of `DataSet` that the files do not contain, from the catalog.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.data.readers import (
    DataFileError,
    bytes_to_tensor,
    read_bytes,
    read_idx,
    read_lines,
    read_npy,
    read_pickle,
)
from equilibria.data.source import DataSet, Split, check_subclasses, stratified_split
from equilibria.registry import nearest

DIGITS_TEST_SHARE = 0.25
DIGITS_SPLIT_SEED = 20220613
"""Fixed, so that every run has the same test images, whatever its seed."""
MAX_DIGIT_PIXEL = 16.0

CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = 3 * 32 * 32
CIFAR10_PARTS = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CIFAR100_CLASSES = {"fine": 100, "coarse": 20}

CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""Corruptions in the mean corruption error: noise, blur, weather, digital."""
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = 5


def load_digits() -> DataSet:
    """Load the handwritten digits of scikit-learn: 1797 images of 8×8 pixels.

    Returns:
        The data set in memory; a quarter of every class is the test set.

    Examples:
        >>> images = eq.data.load_digits().test.images
        >>> images.shape[1:], float(images.max())
        (torch.Size([1, 8, 8]), 1.0)
    """
    pixels, labels = _read_digits()
    everything = Split(
        images=torch.from_numpy(pixels).float().div(MAX_DIGIT_PIXEL).reshape(-1, 1, 8, 8),
        labels=torch.from_numpy(labels).long(),
    )
    train, test = stratified_split(everything, DIGITS_TEST_SHARE, DIGITS_SPLIT_SEED)
    return DataSet("digits", train, test, tuple("0123456789"), license="CC BY 4.0")


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read pixels and labels from scikit-learn's file, since importing scikit-learn is slow."""
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            rows = np.loadtxt(file, delimiter=",")
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)  # type: ignore[no-any-return]


def load_idx(folder: Path, *, about: dict[str, Any]) -> DataSet:
    """Load a data set in MNIST's format: images and labels in idx files, plain or gzipped."""

    def read(part: str) -> Split:
        images, images_file = read_idx(folder, f"{part}-images-idx3-ubyte", dimensions=3)
        labels, labels_file = read_idx(folder, f"{part}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise DataFileError(
                labels_file,
                f"has {len(labels)} labels for the {len(images)} images of {images_file.name}",
                "replace both by fresh copies",
            )
        return _split(labels_file, images.unsqueeze(1), labels, len(about["class_names"]))

    return DataSet(train=read("train"), test=read("t10k"), **about)


def load_cifar10(folder: Path, *, about: dict[str, Any]) -> DataSet:
    """Load CIFAR-10 from `cifar-10-batches-py` (pickled) or `cifar-10-batches-bin` (binary)."""
    *train, test = (_read_cifar(folder, name, ("labels",), "labels", 10) for name in CIFAR10_PARTS)
    images = torch.cat([part.images for part in train])
    labels = torch.cat([part.labels for part in train])
    return DataSet(train=Split(images, labels), test=test, **about)


def load_cifar100(
    folder: Path, *, labels: str = "fine", subclasses: str = "all", about: dict[str, Any]
) -> DataSet:
    """Load CIFAR-100 from `cifar-100-python` or `cifar-100-binary`.

    Args:
        folder: Folder of the files.
        labels: "fine" for 100 classes or "coarse" for 20 groups of classes.
        subclasses: With coarse labels, "known" excludes the last of the five classes of every group
            (in the order of their names). "unseen" has only these, with all their images in the
            test part.
        about: Fields of `DataSet` that the files do not contain, such as its name.
    """
    if labels not in CIFAR100_CLASSES:
        raise ValueError(f"labels must be 'fine' (100 classes) or 'coarse' (20), got {labels!r}")
    check_subclasses(subclasses, labels == "coarse", "coarse")
    classes = CIFAR100_CLASSES[labels]
    read = partial(_read_cifar, folder, columns=("coarse_labels", "fine_labels"))
    train, test = (
        read(name=name, column=f"{labels}_labels", classes=classes) for name in ("train", "test")
    )
    if subclasses != "all":
        fine = [
            read(name=name, column="fine_labels", classes=100).labels for name in ("train", "test")
        ]
        train, test = _by_subclass(train, test, fine, subclasses)
    if (folder / "train.bin").is_file():
        path = folder / f"{labels}_label_names.txt"
        names: Any = " ".join(read_lines(path)).split()
    else:
        path = folder / "meta"
        names = read_pickle(path).get(f"{labels}_label_names")
    if not isinstance(names, list) or len(names) != classes:
        raise DataFileError(path, f"does not name the {classes} {labels} classes")
    return DataSet(train=train, test=test, class_names=tuple(map(str, names)), **about)


def _by_subclass(
    train: Split, test: Split, fine: list[Tensor], subclasses: str
) -> tuple[Split, Split]:
    """Remove the last subclass of every group, or put all its images into the test part."""
    groups, classes = torch.cat([train.labels, test.labels]), torch.cat(fine)
    # Fine labels are in the order of the names, so that the largest of a group is its last class.
    last = [int(classes[groups == group].max()) for group in torch.unique(groups).tolist()]
    train_unseen, test_unseen = (torch.isin(part, torch.tensor(last)) for part in fine)
    if subclasses == "known":
        return _where(train, ~train_unseen), _where(test, ~test_unseen)
    first, second = _where(train, train_unseen), _where(test, test_unseen)
    unseen = Split(
        torch.cat([first.images, second.images]), torch.cat([first.labels, second.labels])
    )
    return unseen.subset(torch.arange(0)), unseen


def _where(split: Split, chosen: Tensor) -> Split:
    return split.subset(chosen.nonzero().squeeze(1))


def load_cifar10_c(
    folder: Path,
    *,
    corruption: str | None = None,
    severity: int | None = None,
    about: dict[str, Any],
) -> DataSet:
    """Load the test images of CIFAR-10-C with one corruption; the training part is empty.

    Args:
        folder: Folder of the files.
        corruption: Name of one of the nineteen corruptions; required.
        severity: Severity, 1 to 5; None for the images of all five.
        about: Fields of `DataSet` that the files do not contain, such as its name and class names.
    """
    known = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    if corruption not in known:
        raise ValueError(
            f"cifar10-c needs the option corruption, got {corruption!r}"
            f"{nearest(corruption, known)} Available: {', '.join(known)}"
        )
    if severity is not None and not 1 <= severity <= SEVERITIES:
        raise ValueError(f"severity must be an integer from 1 to {SEVERITIES}, got {severity}")
    images_file, labels_file = folder / f"{corruption}.npy", folder / "labels.npy"
    images, labels = read_npy(images_file), read_npy(labels_file)
    if images.ndim != 4 or images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8:
        raise DataFileError(
            images_file, f"holds {images.dtype} of shape {images.shape}, not images"
        )
    if labels.shape != images.shape[:1] or len(labels) % SEVERITIES:
        raise DataFileError(
            labels_file,
            f"has labels of shape {labels.shape} for {len(images)} images in five severities",
        )
    if severity is not None:
        images, labels = (np.split(whole, SEVERITIES)[severity - 1] for whole in (images, labels))
    pixels = np.ascontiguousarray(np.moveaxis(images, 3, 1))
    test = Split(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))
    return DataSet(train=test.subset(torch.arange(0)), test=test, **about)


def _read_cifar(
    folder: Path, name: str, columns: tuple[str, ...], column: str, classes: int
) -> Split:
    """Read a batch: pickled in `name`, or in `name.bin` as rows of the label columns and pixels."""
    path = folder / f"{name}.bin"
    if path.is_file():
        content, row = read_bytes(path), len(columns) + CIFAR_PIXELS
        if not content or len(content) % row:
            raise DataFileError(
                path, f"its size of {len(content)} bytes is not a multiple of {row}, one image"
            )
        rows = bytes_to_tensor(content, (-1, row))
        images = rows[:, len(columns) :].reshape(-1, *CIFAR_SHAPE)
        return _split(path, images, rows[:, columns.index(column)], classes)
    path = folder / name
    batch = read_pickle(path)
    pixels, labels = batch.get("data"), batch.get(column)
    if not isinstance(pixels, Tensor) or pixels.dim() != 2 or pixels.shape[1] != CIFAR_PIXELS:
        raise DataFileError(path, f"has no array 'data' with {CIFAR_PIXELS} bytes per image")
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(isinstance(label, int) and 0 <= label < classes for label in labels)
    ):
        raise DataFileError(path, f"has no list of {len(pixels)} labels from 0 to {classes - 1}")
    return Split(pixels.reshape(-1, *CIFAR_SHAPE), torch.tensor(labels, dtype=torch.long))


def _split(path: Path, images: Tensor, labels: Tensor, classes: int) -> Split:
    if len(labels) and int(labels.max()) >= classes:
        raise DataFileError(
            path, f"holds the label {int(labels.max())}, but the largest is {classes - 1}"
        )
    return Split(images, labels.long())
