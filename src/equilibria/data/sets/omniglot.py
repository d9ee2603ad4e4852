"""Omniglot: handwritten characters of many alphabets, twenty drawings each; and episodes of them.

`about` is what a data set's files do not say of it, from the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.data.episodes import Episodes
from equilibria.data.image_files import (
    BRIGHTEST,
    READING_THREADS,
    Framing,
    ImageFiles,
    list_images,
)
from equilibria.data.readers import DataFileError, MissingDataError
from equilibria.data.source import DataSet, Source, read_into_memory

PARTS = (
    ("images_background", "images_evaluation"),
    ("images_background_small1", "images_background_small2"),
)
"""To train on and to test on: the whole, or the two small parts that the authors offer."""
TRAINING_DRAWINGS = 15
TEST_SEED, VALIDATION_SEED = 1, 2
"""Beside the seed of the training episodes: the same test for runs of every seed."""


def load_omniglot(
    folder: Path,
    *,
    parting: str = "characters",
    labels: str = "characters",
    alphabets: Sequence[str] | None = None,
    size: int = 28,
    threads: int = READING_THREADS,
    about: dict[str, Any],
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
    training, testing = (_characters(folder / name) for name in names)
    known = {_alphabet(name) for name in training}
    fresh = {name: drawn for name, drawn in testing.items() if _alphabet(name) not in known}
    characters = _chosen({**training, **fresh}, alphabets)
    classes: dict[str, int] = {}
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for name, drawings in characters.items():
        label = classes.setdefault(_alphabet(name) if labels == "alphabets" else name, len(classes))
        labelled = [(path, label) for path in drawings]
        if parting == "characters":
            (train if name in training else test).extend(labelled)
            continue
        if len(drawings) <= TRAINING_DRAWINGS:
            raise DataFileError(
                drawings[0].parent,
                f"{len(drawings)} drawings, not more than {TRAINING_DRAWINGS}",
                "unpack the whole archive",
            )
        train += labelled[:TRAINING_DRAWINGS]
        test += labelled[TRAINING_DRAWINGS:]
    framing = Framing.make(size)

    def read(part: list[tuple[Path, int]]) -> ImageFiles:
        numbers = torch.tensor([label for _, label in part], dtype=torch.long)
        paths = tuple(path for path, _ in part)
        return ImageFiles(paths, numbers, framing, is_gray=True, threads=threads)

    return DataSet[Source](
        train=read(train), test=read(test), class_names=tuple(classes), framing=framing, **about
    )


def _alphabet(name: str) -> str:
    return name.split("/")[0]


def _chosen(
    characters: dict[str, list[Path]], alphabets: Sequence[str] | None
) -> dict[str, list[Path]]:
    """The characters of these alphabets, in this order."""
    if alphabets is None:
        return characters
    known = list(dict.fromkeys(map(_alphabet, characters)))
    for alphabet in alphabets:
        if alphabet not in known:
            raise ValueError(f"there is no alphabet {alphabet!r} here, only {', '.join(known)}")
    return {
        name: drawings
        for alphabet in alphabets
        for name, drawings in characters.items()
        if _alphabet(name) == alphabet
    }


def _characters(folder: Path) -> dict[str, list[Path]]:
    """The drawings of every character, by `Alphabet/character01`."""
    found = {
        f"{alphabet.name}/{character.name}": list_images(character)
        for alphabet in sorted(entry for entry in folder.iterdir() if entry.is_dir())
        for character in sorted(entry for entry in alphabet.iterdir() if entry.is_dir())
    }
    for name, drawings in found.items():
        if not drawings:
            raise DataFileError(folder / name, "no drawings in it", "unpack the whole archive")
    if not found:
        raise DataFileError(folder, "no alphabets in it", "unpack the whole archive")
    return found


def load_omniglot_episodes(
    folder: Path,
    *,
    ways: int = 5,
    shots: int = 1,
    queries: int = 5,
    episodes: int = 2000,
    test_episodes: int = 400,
    validation_share: float = 0.0,
    size: int = 28,
    rotations: bool = True,
    seed: int = 0,
    about: dict[str, Any],
) -> DataSet[Source]:
    """Episodes of `ways` characters, `shots` drawings of each to learn from and `queries` others.

    Ink is 1, paper 0. `test` has characters that `train` has not (the two parts that the authors of
    Omniglot made); with `validation_share` so many of the training characters are set aside for a
    validation part, of `test_episodes` episodes too. With `rotations` a character turned by 90°,
    180° or 270° is another class, in all parts, as in the literature. `seed` is that of the
    training episodes; those of the other parts are always the same.
    """
    if not 0 <= validation_share < 1:
        raise ValueError(f"validation_share must be in [0, 1), not {validation_share}")
    data = load_omniglot(folder, size=size, about={"name": "omniglot"})
    training, testing = (_by_class(folder, part) for part in (data.train, data.test))
    drawn = Episodes(
        training,
        ways=ways,
        shots=shots,
        queries=queries,
        episodes=episodes,
        seed=seed,
        rotations=rotations,
    )
    validation: Episodes | None = None
    if validation_share:
        chance = torch.Generator().manual_seed(VALIDATION_SEED)
        order = torch.randperm(len(training), generator=chance)
        aside = round(validation_share * len(training))
        validation = replace(
            drawn, images=training[order[:aside]], episodes=test_episodes, seed=VALIDATION_SEED
        )
        drawn = replace(drawn, images=training[order[aside:]])
    return DataSet[Source](
        train=drawn,
        test=replace(drawn, images=testing, episodes=test_episodes, seed=TEST_SEED),
        class_names=tuple(f"class {number}" for number in range(ways)),
        validation=validation,
        framing=data.framing,
        **about,
    )


def _by_class(folder: Path, source: Source) -> Tensor:
    """All drawings, ink bright, as bytes of shape (classes, drawings, 1, size, size)."""
    split = read_into_memory(source)
    counts = torch.bincount(split.labels.long())
    counts = counts[counts > 0]
    if int(counts.min()) != int(counts.max()):
        raise DataFileError(
            folder,
            f"characters with {int(counts.min())} to {int(counts.max())} drawings",
            "unpack the whole archive, which has the same number of every character",
        )
    order = split.labels.argsort(stable=True)
    drawings = (BRIGHTEST - split.images[order].float()).to(torch.uint8)
    return drawings.reshape(len(counts), -1, *drawings.shape[1:])
