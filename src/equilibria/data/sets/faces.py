"""CelebA and FFHQ: faces without labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError, MissingDataError
from equilibria.data.image_files import READING_THREADS, Framing, ImageFiles, list_images
from equilibria.data.registry import DataSetCard, register_dataset
from equilibria.data.source import Source

CELEBA_PARTS = {"0": "train", "1": "validation", "2": "test"}
FFHQ_FOLDERS = ("images1024x1024", "thumbnails128x128")
FFHQ_TRAINING = 60_000
"""The first 60,000 are to train on, as the authors recommend; the rest validate."""


def load_celeba(
    folder: Path, *, size: int | Sequence[int] = 64, threads: int = READING_THREADS
) -> DataSet[Source]:
    """The aligned faces, in the parts of `list_eval_partition.txt`."""
    listing, images = folder / "list_eval_partition.txt", folder / "img_align_celeba"
    parts: dict[str, list[Path | str]] = {part: [] for part in CELEBA_PARTS.values()}
    for number, line in enumerate(listing.read_text().splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[1] not in CELEBA_PARTS or Path(words[0]).name != words[0]:
            raise DataFileError(listing, f"line {number} is not a file's name and 0, 1 or 2")
        parts[CELEBA_PARTS[words[1]]].append(os.path.join(images, words[0]))
    if not parts["train"] or not parts["test"]:
        raise DataFileError(listing, "names no images to train on, or none to test on")
    framing = Framing.make(size)
    train, validation, test = (
        _unlabelled(parts[part], framing, threads) for part in CELEBA_PARTS.values()
    )
    return DataSet[Source](
        "celeba", train, test, (), kind="unlabelled", validation=validation if validation else None
    )


def load_ffhq(
    folder: Path, *, size: int | Sequence[int] = 128, threads: int = READING_THREADS
) -> DataSet[Source]:
    """The faces of `images1024x1024/`, or else `thumbnails128x128/`; the last 10,000 to test on."""
    held = next((folder / name for name in FFHQ_FOLDERS if (folder / name).is_dir()), None)
    if held is None:
        raise MissingDataError(f"{folder} has neither {' nor '.join(FFHQ_FOLDERS)}")
    paths = list_images(held)
    for piece in sorted(entry for entry in held.iterdir() if entry.is_dir()):
        paths += list_images(piece)
    numbers = [_number(path) for path in paths]
    framing = Framing.make(size)
    train, test = (
        _unlabelled(
            [
                path
                for path, number in zip(paths, numbers, strict=True)
                if (number < FFHQ_TRAINING) == is_training
            ],
            framing,
            threads,
        )
        for is_training in (True, False)
    )
    if not train or not test:
        raise DataFileError(
            held,
            f"{len(train)} images numbered below {FFHQ_TRAINING} and {len(test)} from there on",
            "get the images of both parts",
        )
    return DataSet[Source]("ffhq", train, test, (), kind="unlabelled")


def _number(path: Path) -> int:
    if not path.stem.isdigit():
        raise DataFileError(path, "not named by a number", "keep FFHQ's own names (00000.png …)")
    return int(path.stem)


def _unlabelled(paths: list[Path | str], framing: Framing, threads: int) -> ImageFiles:
    labels = torch.zeros(len(paths), dtype=torch.long)
    return ImageFiles(tuple(paths), labels, framing, threads=threads)


register_dataset(
    DataSetCard(
        "celeba",
        summary="faces of celebrities",
        kind="unlabelled",
        size="162,770 + 19,962 (19,867 to validate), 218×178",
        license="non-commercial research",
        folders=("celeba", "CelebA"),
        contents=("img_align_celeba", "list_eval_partition.txt"),
        address="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
        obtain=(
            "To get it, agree to the terms at https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, "
            "and put img_align_celeba/ and list_eval_partition.txt in celeba/."
        ),
    ),
    load_celeba,
)
register_dataset(
    DataSetCard(
        "ffhq",
        summary="faces from Flickr",
        kind="unlabelled",
        size="60,000 + 10,000, 1024×1024",
        license="CC BY-NC-SA 4.0",
        folders=("ffhq", "FFHQ", "ffhq-dataset"),
        contents=("*[0-9]x[0-9]*",),
        address="https://github.com/NVlabs/ffhq-dataset",
        obtain=(
            "To get it, follow https://github.com/NVlabs/ffhq-dataset, and put images1024x1024/ "
            "or thumbnails128x128/ in ffhq/."
        ),
    ),
    load_ffhq,
)
