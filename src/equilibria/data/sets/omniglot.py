"""Omniglot: handwritten characters of many alphabets, twenty drawings each; and episodes of them.

In a few-shot episode there are a few classes, some samples of each to learn from, others to be
asked about: Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016.

`about` is what a data set's files do not say of it, from the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.data.batches import read_into_memory
from equilibria.data.file_sources import READING_THREADS, ImageFiles
from equilibria.data.finding import list_folders, list_images
from equilibria.data.image_files import BRIGHTEST, as_pixels
from equilibria.data.readers import MissingDataError, incomplete
from equilibria.data.source import DataSet, Source, check_subclasses
from equilibria.images import Framing
from equilibria.registry import check_values

PARTS = (
    ("images_background", "images_evaluation"),
    ("images_background_small1", "images_background_small2"),
)
"""To train on and to test on: the whole, or the two small parts that the authors offer."""
TRAINING_DRAWINGS = 15
UNSEEN_CHARACTER = 5
"""Of every so many characters of an alphabet the last is left out with `subclasses="known"`."""
TEST_SEED, VALIDATION_SEED = 1, 2
"""Beside the seed of the training episodes: the same test for runs of every seed."""
QUARTER_TURNS = 4


def load_omniglot(
    folder: Path,
    *,
    parting: str = "characters",
    labels: str = "characters",
    alphabets: Sequence[str] | None = None,
    subclasses: str = "all",
    size: int = 28,
    threads: int = READING_THREADS,
    about: dict[str, Any],
) -> DataSet:
    """Gray images, black on white, as on disk.

    With `parting="characters"`, the way of few-shot learning, `test` has characters that `train`
    has not; with "drawings" both have all characters, and the last five drawings of each test.
    An alphabet that is in both parts (the small ones share two) counts as one to train on.
    With `labels="alphabets"` the class of a drawing is its alphabet. `alphabets` names those to
    read, by default all, in the order that their classes shall have. With alphabets as labels,
    `subclasses="known"` leaves out every fifth character, and "unseen" has these alone: all of
    their drawings, to test on.
    """
    if parting not in ("characters", "drawings"):
        raise ValueError(f"parting must be 'characters' or 'drawings', not {parting!r}")
    if labels not in ("characters", "alphabets"):
        raise ValueError(f"labels must be 'characters' or 'alphabets', not {labels!r}")
    check_subclasses(subclasses, labels == "alphabets", "alphabets")
    names = next((pair for pair in PARTS if all((folder / name).is_dir() for name in pair)), None)
    if names is None:
        raise MissingDataError(
            f"{folder} lacks a pair of parts, {' or '.join(' and '.join(pair) for pair in PARTS)}"
        )
    training, testing = (_characters(folder / name) for name in names)
    fresh = {alphabet: drawn for alphabet, drawn in testing.items() if alphabet not in training}
    characters = {**training, **fresh}
    classes: dict[str, int] = {}
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for alphabet in alphabets or characters:
        if alphabet not in characters:
            known = ", ".join(characters)
            raise ValueError(f"there is no alphabet {alphabet!r} here, only {known}")
        for place, (character, drawings) in enumerate(characters[alphabet].items(), start=1):
            name = alphabet if labels == "alphabets" else f"{alphabet}/{character}"
            label = classes.setdefault(name, len(classes))
            if subclasses != "all" and (place % UNSEEN_CHARACTER == 0) != (subclasses == "unseen"):
                continue
            labelled = [(path, label) for path in drawings]
            if subclasses == "unseen":
                test += labelled
                continue
            if parting == "characters":
                (train if alphabet in training else test).extend(labelled)
                continue
            if len(drawings) <= TRAINING_DRAWINGS:
                few = f"{len(drawings)} drawings, not more than {TRAINING_DRAWINGS}"
                raise incomplete(drawings[0].parent, few)
            train += labelled[:TRAINING_DRAWINGS]
            test += labelled[TRAINING_DRAWINGS:]
    framing = Framing.make(size)

    def read(part: list[tuple[Path, int]]) -> ImageFiles:
        numbers = torch.tensor([label for _, label in part], dtype=torch.long)
        paths = tuple(path for path, _ in part)
        return ImageFiles(paths, numbers, framing, is_gray=True, threads=threads)

    return DataSet(
        train=read(train), test=read(test), class_names=tuple(classes), framing=framing, **about
    )


def _characters(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """The drawings of every character of every alphabet."""
    found = {
        alphabet.name: {kind.name: list_images(kind) for kind in list_folders(alphabet)}
        for alphabet in list_folders(folder)
    }
    if not any(found.values()):
        raise incomplete(folder, "no alphabets in it")
    for alphabet, characters in found.items():
        for character, drawings in characters.items():
            if not drawings:
                raise incomplete(folder / alphabet / character, "no drawings in it")
    return found


@dataclass(frozen=True)
class Episodes:
    """Episodes drawn from classes of images; an episode is a sample of this source.

    Images have shape `(B, ways · (shots + queries), C, H, W)`: first `shots` images of each of
    `ways` classes (the support), then `queries` others of each. Labels are 0 … ways − 1 in that
    order within both parts, so that they tell where the support ends. Which class is called what is
    chance. An episode depends on `seed` and its index alone.

    images: bytes, shape (classes, drawings, C, H, W).
    rotations: every class also turned by 90°, 180° and 270°, as three more classes.

    Examples:
        >>> images = torch.rand(6, 20, 1, 8, 8)  # 20 images of each of 6 classes
        >>> source = eq.data.Episodes(images, ways=5, shots=1, queries=3, episodes=10, seed=0)
        >>> len(source), source.fetch(torch.tensor([0]))[0].shape
        (10, torch.Size([1, 20, 1, 8, 8]))
    """

    images: Tensor
    ways: int
    shots: int
    queries: int
    episodes: int
    seed: int
    rotations: bool = False

    def __post_init__(self) -> None:
        if self.ways < 2:
            raise ValueError(f"ways must be at least 2, not {self.ways}")
        check_values(self, at_least_one=("shots", "queries", "episodes"))
        classes, drawings, _, height, width = self.images.shape
        if self.shots + self.queries > drawings:
            raise ValueError(
                f"{self.shots} shots and {self.queries} queries are more than the {drawings} "
                "samples of a class: lower one of them"
            )
        if self.ways > classes:
            raise ValueError(f"there are {classes} classes, too few for ways={self.ways}")
        if self.rotations and height != width:
            raise ValueError(f"rotations needs square images, not {height}×{width}")

    @property
    def classes(self) -> int:
        """How many classes episodes are drawn from, rotated ones included."""
        return len(self.images) * (QUARTER_TURNS if self.rotations else 1)

    @property
    def targets(self) -> Tensor:
        """The labels of any episode."""
        names = torch.arange(self.ways)
        return torch.cat([names.repeat_interleave(n) for n in (self.shots, self.queries)])

    def __len__(self) -> int:
        return self.episodes

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and targets of episodes by index."""
        shape = (len(indices), len(self.targets), *self.images.shape[2:])
        images = torch.empty(shape, dtype=self.images.dtype)
        for row, index in enumerate(indices.tolist()):
            images[row] = self._episode(index)
        return as_pixels(images), self.targets.repeat(len(indices), 1)

    def _episode(self, index: int) -> Tensor:
        chance = np.random.default_rng((self.seed, index))
        chosen = chance.choice(self.classes, self.ways, replace=False)
        support, query = [], []
        for kind in chosen.tolist():
            character, turns = kind % len(self.images), kind // len(self.images)
            drawings = self.images[character]
            order = chance.permutation(len(drawings))[: self.shots + self.queries]
            drawn = torch.rot90(drawings[torch.from_numpy(order)], turns, dims=(-2, -1))
            support.append(drawn[: self.shots])
            query.append(drawn[self.shots :])
        return torch.cat(support + query)


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
) -> DataSet:
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
    drawn = Episodes(training, ways, shots, queries, episodes, seed, rotations)
    validation: Episodes | None = None
    if validation_share:
        chance = torch.Generator().manual_seed(VALIDATION_SEED)
        order = torch.randperm(len(training), generator=chance)
        aside = round(validation_share * len(training))
        validation = replace(
            drawn, images=training[order[:aside]], episodes=test_episodes, seed=VALIDATION_SEED
        )
        drawn = replace(drawn, images=training[order[aside:]])
    return DataSet(
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
        found = f"{int(counts.min())} to {int(counts.max())} drawings"
        raise incomplete(folder, f"characters with {found}, not all with the same number")
    order = split.labels.argsort(stable=True)
    drawings = int(BRIGHTEST) - split.images[order]
    return drawings.reshape(len(counts), -1, *drawings.shape[1:])
