"""CIFAR-10-C: the test images of CIFAR-10 under nineteen corruptions of five severities."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError, MissingDataError
from equilibria.data.registry import DataSetCard, Download, register_dataset
from equilibria.data.sets.cifar import CLASSES_10, MEAN_10, SHAPE, STD_10
from equilibria.data.source import Source
from equilibria.data.split import Split

CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""The fifteen that the mean corruption error is over."""
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = 5


def load_cifar10_c(
    folder: Path, *, corruption: str | None = None, severity: int | None = None
) -> DataSet[Source]:
    """One corruption of CIFAR-10's test images, of one severity or (None) of all five.

    There is nothing to train on: `train` is empty.
    """
    known = (*CORRUPTIONS, *EXTRA_CORRUPTIONS)
    if corruption not in known:
        near = difflib.get_close_matches(str(corruption), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"cifar10-c needs a corruption, not {corruption!r}; {hint}There are: {', '.join(known)}"
        )
    if severity is not None and not 1 <= severity <= SEVERITIES:
        raise ValueError(f"severity is a number from 1 to {SEVERITIES}, not {severity}")
    images_file, labels_file = folder / f"{corruption}.npy", folder / "labels.npy"
    images, labels = _read(images_file), _read(labels_file)
    if images.ndim != 4 or images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8:
        raise DataFileError(images_file, f"{images.dtype} of shape {images.shape}, not images")
    if labels.shape != images.shape[:1] or len(labels) % SEVERITIES:
        raise DataFileError(
            labels_file, f"labels of shape {labels.shape} for {len(images)} images, five severities"
        )
    part = slice(None)
    if severity is not None:
        share = len(labels) // SEVERITIES
        part = slice((severity - 1) * share, severity * share)
    # Only the part that was asked for is read from the disk.
    pixels = np.ascontiguousarray(np.moveaxis(images[part], 3, 1))
    test = Split(torch.from_numpy(pixels), torch.from_numpy(labels[part].astype(np.int64)))
    nothing = Split(torch.zeros(0, *SHAPE, dtype=torch.uint8), torch.zeros(0, dtype=torch.long))
    return DataSet[Source]("cifar10-c", nothing, test, CLASSES_10, mean=MEAN_10, std=STD_10)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise MissingDataError(f"{path} is missing: unpack the whole of CIFAR-10-C.tar there")
    try:
        # Of `np.load` the part for plain arrays alone: no pickles, no archives.
        return np.lib.format.open_memmap(path, mode="r")
    except (EOFError, ValueError) as error:
        raise DataFileError(path, f"not a plain .npy file ({error})") from error


register_dataset(
    DataSetCard(
        "cifar10-c",
        summary="CIFAR-10's test images, corrupted",
        classes=10,
        size="19 × 5 × 10,000 to test on, 32×32",
        license="CC BY 4.0",
        folders=("CIFAR-10-C",),
        contents=("labels.npy", "*_noise.npy"),
        address="https://zenodo.org/records/2535967",
        obtain="Get it with `equilibria datasets get cifar10-c` (2.9 GB).",
        downloads=(
            Download(
                "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
                "md5:56bf5dcef84df0e2308c6dcbcbbd8499",
                "CIFAR-10-C",
                unpack_into=".",
            ),
        ),
    ),
    load_cifar10_c,
)
