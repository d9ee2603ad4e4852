"""Omniglot: handwritten characters of many alphabets, twenty drawings each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from equilibria.data.dataset import DataSet
from equilibria.data.errors import DataFileError, MissingDataError
from equilibria.data.image_files import READING_THREADS, Framing, ImageFiles, list_images
from equilibria.data.registry import DataSetCard, Download, register_dataset
from equilibria.data.source import Source

PARTS = (
    ("images_background", "images_evaluation"),
    ("images_background_small1", "images_background_small2"),
)
"""To train on and to test on: the whole, or the two small parts that the authors offer."""
ADDRESS = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
CHECKSUMS = {
    "images_background": "68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation": "6b91aef0f799c5bb55b94e3f2daec811",
}
TRAINING_DRAWINGS = 15


def load_omniglot(
    folder: Path,
    *,
    parting: str = "characters",
    labels: str = "characters",
    alphabets: Sequence[str] | None = None,
    size: int = 28,
    threads: int = READING_THREADS,
) -> DataSet[Source]:
    """Gray images, black on white, as on disk.

    With `parting="characters"`, the way of few-shot learning, `test` has characters that `train`
    has not; with "drawings" both have all characters, and the last five drawings of each test.
    An alphabet that is in both parts (the small ones share two) counts as one to train on.
    With `labels="alphabets"` the class of a drawing is its alphabet. `alphabets` names those to
    read, by default all, in the order that their classes shall have.
    """
    if parting not in ("characters", "drawings"):
        raise ValueError(f"parting must be 'characters' or 'drawings', not {parting!r}")
    if labels not in ("characters", "alphabets"):
        raise ValueError(f"labels must be 'characters' or 'alphabets', not {labels!r}")
    names = next((pair for pair in PARTS if all((folder / name).is_dir() for name in pair)), None)
    if names is None:
        raise MissingDataError(
            f"{folder} lacks a pair of parts, {' or '.join(' and '.join(pair) for pair in PARTS)}"
        )
    training = _characters(folder / names[0])
    fresh = {
        name: drawings
        for name, drawings in _characters(folder / names[1]).items()
        if _alphabet(name) not in {_alphabet(known) for known in training}
    }
    everything = _chosen([*training.items(), *fresh.items()], alphabets)

    def class_of(name: str) -> str:
        return _alphabet(name) if labels == "alphabets" else name

    classes = list(dict.fromkeys(class_of(name) for name, _ in everything))
    numbers = {name: number for number, name in enumerate(classes)}
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for name, drawings in everything:
        label = numbers[class_of(name)]
        if parting == "drawings":
            held_back = len(drawings) - TRAINING_DRAWINGS
            if held_back < 1:
                raise DataFileError(
                    drawings[0].parent,
                    f"{len(drawings)} drawings, not more than {TRAINING_DRAWINGS}",
                    "unpack the whole archive",
                )
            train += [(path, label) for path in drawings[:TRAINING_DRAWINGS]]
            test += [(path, label) for path in drawings[TRAINING_DRAWINGS:]]
        else:
            part = train if name in training else test
            part += [(path, label) for path in drawings]
    framing = Framing.make(size)
    return DataSet[Source](
        "omniglot",
        _drawings(train, framing, threads),
        _drawings(test, framing, threads),
        tuple(classes),
    )


def _alphabet(name: str) -> str:
    return name.split("/")[0]


def _chosen(
    characters: list[tuple[str, list[Path]]], alphabets: Sequence[str] | None
) -> list[tuple[str, list[Path]]]:
    """The characters of these alphabets, in this order."""
    if alphabets is None:
        return characters
    known = list(dict.fromkeys(_alphabet(name) for name, _ in characters))
    for alphabet in alphabets:
        if alphabet not in known:
            raise ValueError(f"there is no alphabet {alphabet!r} here, only {', '.join(known)}")
    return [
        (name, drawings)
        for alphabet in dict.fromkeys(alphabets)
        for name, drawings in characters
        if _alphabet(name) == alphabet
    ]


def _characters(folder: Path) -> dict[str, list[Path]]:
    """The drawings of every character, by `Alphabet/character01`."""
    found = {
        f"{alphabet.name}/{character.name}": list_images(character)
        for alphabet in _folders(folder)
        for character in _folders(alphabet)
    }
    for name, drawings in found.items():
        if not drawings:
            raise DataFileError(folder / name, "no drawings in it", "unpack the whole archive")
    if not found:
        raise DataFileError(folder, "no alphabets in it", "unpack the whole archive")
    return found


def _folders(folder: Path) -> Sequence[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir())


def _drawings(samples: list[tuple[Path, int]], framing: Framing, threads: int) -> ImageFiles:
    labels = torch.tensor([label for _, label in samples], dtype=torch.long)
    paths = tuple(path for path, _ in samples)
    return ImageFiles(paths, labels, framing, is_gray=True, threads=threads)


register_dataset(
    DataSetCard(
        "omniglot",
        summary="handwritten characters of fifty alphabets",
        classes=1623,
        size="19,280 + 13,180, 105×105 black and white",
        license="MIT",
        folders=("omniglot-py",),
        contents=("images_background*", "images_*[n2]"),
        address="https://github.com/brendenlake/omniglot",
        obtain="Get it with `equilibria datasets get omniglot`.",
        downloads=tuple(
            Download(
                f"{ADDRESS}/{name}.zip",
                f"md5:{digest}",
                f"omniglot-py/{name}",
                unpack_into="omniglot-py",
            )
            for name, digest in CHECKSUMS.items()
        ),
    ),
    load_omniglot,
)
