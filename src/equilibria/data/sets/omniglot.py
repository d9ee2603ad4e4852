"""Omniglot: handwritten characters of many alphabets, twenty drawings each, and episodes of them.

A few-shot episode has a few classes, with some samples of each to learn from (the support) and
some to classify (the queries): Vinyals et al., "Matching Networks for One Shot Learning",
NeurIPS 2016.

The argument `about` has the fields of `DataSet` that the files do not contain, from the catalog.
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
"""Folders of the training and the test part: all characters, or the published small parts."""
TRAINING_DRAWINGS = 15
UNSEEN_CHARACTER = 5
"""With `subclasses="known"`, every fifth character of an alphabet is excluded."""
TEST_SEED, VALIDATION_SEED = 1, 2
"""Fixed, so that every run has the same test episodes, whatever its seed."""
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
    """Load Omniglot as gray images, black on white.

    Args:
        folder: Folder of the data set.
        parting: With "characters", as in few-shot learning, the test characters are not in the
            training part. With "drawings" both parts have all characters, and the test part has the
            last five drawings of each. An alphabet in both published parts (the small ones share
            two) is one to train on.
        labels: "characters", or "alphabets" for the alphabet of a drawing as its class.
        alphabets: Alphabets to read, in the order of their classes; by default all.
        subclasses: With alphabets as labels, "known" excludes every fifth character. "unseen" has
            only these, with all their drawings in the test part.
        size: Side that images are scaled to.
        threads: Number of threads that decode images.
        about: Fields of `DataSet` that the files do not contain, such as its name.
    """
    if parting not in ("characters", "drawings"):
        raise ValueError(f"parting must be 'characters' or 'drawings', got {parting!r}")
    if labels not in ("characters", "alphabets"):
        raise ValueError(f"labels must be 'characters' or 'alphabets', got {labels!r}")
    check_subclasses(subclasses, labels == "alphabets", "alphabets")
    names = next((pair for pair in PARTS if all((folder / name).is_dir() for name in pair)), None)
    if names is None:
        raise MissingDataError(
            f"{folder} must contain {' or '.join(' and '.join(pair) for pair in PARTS)}: unpack "
            "the whole data set there"
        )
    training, testing = (_characters(folder / name) for name in names)
    unseen = {alphabet: drawn for alphabet, drawn in testing.items() if alphabet not in training}
    characters = {**training, **unseen}
    classes: dict[str, int] = {}
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for alphabet in alphabets or characters:
        if alphabet not in characters:
            known = ", ".join(characters)
            raise ValueError(f"there is no alphabet {alphabet!r} in {folder}. Available: {known}")
        for number, (character, drawings) in enumerate(characters[alphabet].items(), start=1):
            name = alphabet if labels == "alphabets" else f"{alphabet}/{character}"
            label = classes.setdefault(name, len(classes))
            is_unseen = number % UNSEEN_CHARACTER == 0
            if subclasses != "all" and is_unseen != (subclasses == "unseen"):
                continue
            labelled = [(path, label) for path in drawings]
            if subclasses == "unseen":
                test += labelled
                continue
            if parting == "characters":
                (train if alphabet in training else test).extend(labelled)
                continue
            if len(drawings) <= TRAINING_DRAWINGS:
                problem = f"has {len(drawings)} drawings, expected more than {TRAINING_DRAWINGS}"
                raise incomplete(drawings[0].parent, problem)
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
    """Return the drawings of every character of every alphabet."""
    alphabets = {
        alphabet.name: {kind.name: list_images(kind) for kind in list_folders(alphabet)}
        for alphabet in list_folders(folder)
    }
    if not any(alphabets.values()):
        raise incomplete(folder, "there are no alphabets in it")
    for alphabet, characters in alphabets.items():
        for character, drawings in characters.items():
            if not drawings:
                raise incomplete(folder / alphabet / character, "there are no drawings in it")
    return alphabets


@dataclass(frozen=True)
class Episodes:
    """Source of few-shot episodes; each sample is an episode.

    Images have shape (B, ways · (shots + queries), C, H, W). The first `ways · shots` images are
    the support, grouped by class; then follow the queries, grouped likewise. Labels are
    0, …, ways − 1 in the order of the groups, and are assigned to the classes at random. An episode
    depends only on `seed` and its index.

    Args:
        images: Images by class, shape (classes, drawings, C, H, W); floats in [0, 1], or bytes.
        ways: Number of classes per episode.
        shots: Number of support images per class.
        queries: Number of query images per class.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        rotations: Whether each class rotated by 90°, 180° and 270° counts as three more classes.

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
            raise ValueError(f"ways must be at least 2, got {self.ways}")
        check_values(self, at_least_one=("shots", "queries", "episodes"))
        classes, drawings, _, height, width = self.images.shape
        if self.shots + self.queries > drawings:
            raise ValueError(
                f"shots + queries must be at most {drawings}, the number of images per class, got "
                f"{self.shots} + {self.queries}"
            )
        if self.ways > classes:
            raise ValueError(
                f"ways must be at most {classes}, the number of classes, got {self.ways}"
            )
        if self.rotations and height != width:
            raise ValueError(
                f"rotations needs square images, got {height}×{width}: set rotations=False"
            )

    @property
    def classes(self) -> int:
        """Number of classes to draw from, including rotated ones."""
        return len(self.images) * (QUARTER_TURNS if self.rotations else 1)

    @property
    def targets(self) -> Tensor:
        """Labels of an episode, which are the same for all."""
        labels = torch.arange(self.ways)
        return torch.cat([labels.repeat_interleave(n) for n in (self.shots, self.queries)])

    def __len__(self) -> int:
        return self.episodes

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels of episodes.

        Args:
            indices: Indices of the episodes, shape (B,).
        """
        shape = (len(indices), len(self.targets), *self.images.shape[2:])
        images = torch.empty(shape, dtype=self.images.dtype)
        for row, index in enumerate(indices.tolist()):
            images[row] = self._episode(index)
        return as_pixels(images), self.targets.repeat(len(indices), 1)

    def _episode(self, index: int) -> Tensor:
        rng = np.random.default_rng((self.seed, index))
        chosen = rng.choice(self.classes, self.ways, replace=False)
        support, query = [], []
        for kind in chosen.tolist():
            character, turns = kind % len(self.images), kind // len(self.images)
            drawings = self.images[character]
            order = rng.permutation(len(drawings))[: self.shots + self.queries]
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
    """Load few-shot episodes of Omniglot; ink is 1, paper 0.

    Training and test characters are those of the two published parts.

    Args:
        folder: Folder of the data set.
        ways: Number of characters per episode.
        shots: Number of support drawings per character.
        queries: Number of query drawings per character.
        episodes: Number of training episodes.
        test_episodes: Number of test episodes, and of validation episodes.
        validation_share: Share of the training characters that is held out for validation.
        size: Side that images are scaled to.
        rotations: Whether a character rotated by 90°, 180° or 270° is another class, in all parts,
            as in the literature.
        seed: Seed of the training episodes; the others are the same for all seeds.
        about: Fields of `DataSet` that the files do not contain, such as its name.
    """
    if not 0 <= validation_share < 1:
        raise ValueError(f"validation_share must be in [0, 1), got {validation_share}")
    data = load_omniglot(folder, size=size, about={"name": "omniglot"})
    training, testing = (_by_class(folder, part) for part in (data.train, data.test))
    drawn = Episodes(training, ways, shots, queries, episodes, seed, rotations)
    validation: Episodes | None = None
    if validation_share:
        generator = torch.Generator().manual_seed(VALIDATION_SEED)
        order = torch.randperm(len(training), generator=generator)
        count = round(validation_share * len(training))
        validation = replace(
            drawn, images=training[order[:count]], episodes=test_episodes, seed=VALIDATION_SEED
        )
        drawn = replace(drawn, images=training[order[count:]])
    return DataSet(
        train=drawn,
        test=replace(drawn, images=testing, episodes=test_episodes, seed=TEST_SEED),
        class_names=tuple(f"class {number}" for number in range(ways)),
        validation=validation,
        framing=data.framing,
        **about,
    )


def _by_class(folder: Path, source: Source) -> Tensor:
    """Return all drawings with bright ink, bytes of shape (classes, drawings, 1, size, size)."""
    split = read_into_memory(source)
    counts = torch.bincount(split.labels.long())
    counts = counts[counts > 0]
    if int(counts.min()) != int(counts.max()):
        raise incomplete(
            folder,
            f"characters have {int(counts.min())} to {int(counts.max())} drawings, expected the "
            "same number for all",
        )
    order = split.labels.argsort(stable=True)
    drawings = int(BRIGHTEST) - split.images[order]
    return drawings.reshape(len(counts), -1, *drawings.shape[1:])
