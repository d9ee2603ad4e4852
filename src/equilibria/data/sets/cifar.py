"""CIFAR-10 and CIFAR-100: 32×32 color images in pickled or in binary batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError
from equilibria.data.pickles import read_pickle
from equilibria.data.registry import DataSetCard, Download, register_dataset
from equilibria.data.source import Source
from equilibria.data.split import Split

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
LICENCE = "none stated; cite Krizhevsky, 2009"
CLASSES_10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
MEAN_10, STD_10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MEAN_100, STD_100 = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
BATCHES_10 = tuple(f"data_batch_{number}" for number in range(1, 6))
COARSE_CLASSES, FINE_CLASSES = 20, 100


def load_cifar10(folder: Path) -> DataSet[Source]:
    """CIFAR-10 from `cifar-10-batches-py` or `cifar-10-batches-bin`."""

    def read(*names: str) -> Split:
        if _is_binary(folder):
            parts = [_read_binary(folder / f"{name}.bin", 1, 0, 10) for name in names]
        else:
            parts = [_read_pickled(folder / name, "labels", 10) for name in names]
        return _join(parts)

    return DataSet[Source](
        "cifar10", read(*BATCHES_10), read("test_batch"), CLASSES_10, mean=MEAN_10, std=STD_10
    )


def load_cifar100(folder: Path, *, labels: str = "fine") -> DataSet[Source]:
    """CIFAR-100 from `cifar-100-python` or `cifar-100-binary`; `labels` is "fine" or "coarse"."""
    if labels not in ("fine", "coarse"):
        raise ValueError(f"labels must be 'fine' (100 classes) or 'coarse' (20), not {labels!r}")
    classes = FINE_CLASSES if labels == "fine" else COARSE_CLASSES

    def read(name: str) -> Split:
        if _is_binary(folder):
            return _read_binary(folder / f"{name}.bin", 2, int(labels == "fine"), classes)
        return _read_pickled(folder / name, f"{labels}_labels", classes)

    names = _names_100(folder, labels)
    return DataSet[Source](
        "cifar100", read("train"), read("test"), names, mean=MEAN_100, std=STD_100
    )


def _is_binary(folder: Path) -> bool:
    return any(folder.glob("*.bin"))


def _read_pickled(path: Path, key: str, classes: int) -> Split:
    batch = read_pickle(path)
    pixels, labels = batch.get("data"), batch.get(key)
    if not isinstance(pixels, Tensor) or pixels.dim() != 2 or pixels.shape[1] != PIXELS:
        raise DataFileError(path, f"has no array 'data' with {PIXELS} bytes an image")
    return Split(pixels.reshape(-1, *SHAPE), _checked_labels(path, labels, len(pixels), classes))


def _checked_labels(path: Path, labels: Any, samples: int, classes: int) -> Tensor:
    if (
        not isinstance(labels, list)
        or len(labels) != samples
        or not all(isinstance(label, int) and 0 <= label < classes for label in labels)
    ):
        raise DataFileError(path, f"has no list of {samples} labels from 0 to {classes - 1}")
    return torch.tensor(labels, dtype=torch.long)


def _read_binary(path: Path, labels: int, column: int, classes: int) -> Split:
    """Rows of `labels` bytes and an image; the label in `column` is the one to take."""
    content = bytearray(path.read_bytes())
    row = labels + PIXELS
    if not content or len(content) % row:
        raise DataFileError(path, f"cut off or foreign: {len(content)} bytes, not rows of {row}")
    rows = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, row)
    found = rows[:, column].long()
    if int(found.max()) >= classes:
        raise DataFileError(path, f"holds the label {int(found.max())} of {classes}")
    return Split(rows[:, labels:].reshape(-1, *SHAPE).clone(), found)


def _names_100(folder: Path, labels: str) -> tuple[str, ...]:
    if _is_binary(folder):
        path = folder / f"{labels}_label_names.txt"
        names: Any = path.read_text().split()
    else:
        path = folder / "meta"
        names = read_pickle(path).get(f"{labels}_label_names")
    wanted = FINE_CLASSES if labels == "fine" else COARSE_CLASSES
    if not isinstance(names, list) or len(names) != wanted:
        raise DataFileError(path, f"does not name the {wanted} {labels} classes")
    return tuple(map(str, names))


def _join(parts: Sequence[Split]) -> Split:
    return Split(
        torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    )


register_dataset(
    DataSetCard(
        "cifar10",
        summary="small photographs of ten kinds of things",
        classes=10,
        size="50,000 + 10,000, 32×32",
        license=LICENCE,
        folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
        contents=tuple(f"{name}*" for name in (*BATCHES_10, "test_batch")),
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
        obtain="Get it with `equilibria datasets get cifar10`.",
        downloads=(
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "md5:c58f30108f718f92721af3b95e74349a",
                "cifar-10-batches-py",
                unpack_into=".",
            ),
        ),
    ),
    load_cifar10,
)
register_dataset(
    DataSetCard(
        "cifar100",
        summary="small photographs of a hundred kinds of things, in twenty groups",
        classes=100,
        size="50,000 + 10,000, 32×32",
        license=LICENCE,
        folders=("cifar-100-python", "cifar-100-binary"),
        contents=("train*", "test*"),
        address="https://www.cs.toronto.edu/~kriz/cifar.html",
        obtain="Get it with `equilibria datasets get cifar100`.",
        downloads=(
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
                "cifar-100-python",
                unpack_into=".",
            ),
        ),
    ),
    load_cifar100,
)
