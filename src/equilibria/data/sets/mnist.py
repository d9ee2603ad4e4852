"""MNIST and Fashion-MNIST: images of 28×28 in idx files, plain or gzipped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError
from equilibria.data.idx import find_idx, read_idx
from equilibria.data.registry import DataSetCard, Download, register_dataset
from equilibria.data.source import Source
from equilibria.data.split import Split

PARTS = ("train", "t10k")
CONTENTS = tuple(
    f"{part}-{what}-ubyte*" for part in PARTS for what in ("images-idx3", "labels-idx1")
)
CLOTHES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def load_idx_images(
    folder: Path, *, name: str, class_names: tuple[str, ...], mean: float, std: float
) -> DataSet[Source]:
    """A data set in MNIST's format."""
    train, test = (_read_part(folder, part, len(class_names)) for part in PARTS)
    return DataSet[Source](name, train, test, class_names, mean=(mean,), std=(std,))


def _read_part(folder: Path, part: str, classes: int) -> Split:
    images_file = find_idx(folder, f"{part}-images-idx3-ubyte")
    labels_file = find_idx(folder, f"{part}-labels-idx1-ubyte")
    images = read_idx(images_file, dimensions=3)
    labels = read_idx(labels_file, dimensions=1)
    if len(images) != len(labels):
        raise DataFileError(
            labels_file,
            f"{len(labels)} labels for the {len(images)} images of {images_file.name}",
            "replace both by fresh copies",
        )
    if len(labels) and int(labels.max()) >= classes:
        raise DataFileError(labels_file, f"holds the label {int(labels.max())} of {classes}")
    return Split(images.unsqueeze(1), labels.long())


def _downloads(address: str, folder: str, files: dict[str, str]) -> tuple[Download, ...]:
    return tuple(
        Download(f"{address}{file}", f"md5:{digest}", f"{folder}/{file}")
        for file, digest in files.items()
    )


register_dataset(
    DataSetCard(
        "mnist",
        summary="handwritten digits",
        classes=10,
        size="60,000 + 10,000, 28×28 gray",
        license="CC BY-SA 3.0",
        folders=("MNIST/raw",),
        contents=CONTENTS,
        address="http://yann.lecun.com/exdb/mnist/",
        obtain="Get it with `equilibria datasets get mnist`.",
        downloads=_downloads(
            "https://ossci-datasets.s3.amazonaws.com/mnist/", "MNIST/raw", MNIST_FILES
        ),
    ),
    partial(
        load_idx_images, name="mnist", class_names=tuple("0123456789"), mean=0.1307, std=0.3081
    ),
)
register_dataset(
    DataSetCard(
        "fashion-mnist",
        summary="articles of clothing",
        classes=10,
        size="60,000 + 10,000, 28×28 gray",
        license="MIT",
        folders=("FashionMNIST/raw",),
        contents=CONTENTS,
        address="https://github.com/zalandoresearch/fashion-mnist",
        obtain="Get it with `equilibria datasets get fashion-mnist`.",
        downloads=_downloads(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "FashionMNIST/raw",
            FASHION_FILES,
        ),
    ),
    partial(load_idx_images, name="fashion-mnist", class_names=CLOTHES, mean=0.2860, std=0.3530),
)
