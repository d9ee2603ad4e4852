"""Episodes of Omniglot's characters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from equilibria.data.dataset import DataSet
from equilibria.data.episodes import Episodes
from equilibria.data.errors import DataFileError
from equilibria.data.registry import dataset_card, register_dataset
from equilibria.data.sets.omniglot import load_omniglot
from equilibria.data.source import Source
from equilibria.data.split import BRIGHTEST, read_into_memory

TEST_SEED, VALIDATION_SEED = 1, 2
"""Beside the seed of the training episodes: the same test for runs of every seed."""


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
    data = load_omniglot(folder, parting="characters", size=size)
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
        order = torch.randperm(
            len(training), generator=torch.Generator().manual_seed(VALIDATION_SEED)
        )
        aside = round(validation_share * len(training))
        validation = replace(
            drawn,
            images=training[order[:aside]],
            episodes=test_episodes,
            seed=VALIDATION_SEED,
        )
        drawn = replace(drawn, images=training[order[aside:]])
    test = replace(drawn, images=testing, episodes=test_episodes, seed=TEST_SEED)
    return DataSet[Source](
        "omniglot-episodes",
        drawn,
        test,
        tuple(f"class {number}" for number in range(ways)),
        kind="episodes",
        validation=validation,
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


register_dataset(
    replace(
        dataset_card("omniglot"),
        name="omniglot-episodes",
        summary="few-shot episodes of handwritten characters",
        kind="episodes",
        classes=5,
        size="2,000 + 400 episodes (options), 28×28 gray",
    ),
    load_omniglot_episodes,
)
