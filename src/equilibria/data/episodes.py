"""Few-shot episodes: a few classes, some samples of each to learn from, others to be asked about.

Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equilibria.data.image_files import BRIGHTEST

QUARTER_TURNS = 4


@dataclass(frozen=True)
class Episodes:
    """Episodes drawn from classes of images; an episode is a sample of this source.

    Images have shape `(B, ways · (shots + queries), C, H, W)`: first `shots` images of each of
    `ways` classes (the support), then `queries` others of each. Labels are 0 … ways − 1 in that
    order within both parts, so that they tell where the support ends. Which class is called what is
    chance. An episode depends on `seed` and its index alone.

    images: bytes, shape (classes, drawings, C, H, W).
    rotations: every class also turned by 90°, 180° and 270°, as three more classes.
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
        for name in ("shots", "queries", "episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
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
        if not len(indices):
            shape = (0, len(self.targets), *self.images.shape[2:])
            return torch.zeros(shape), self.targets.new_zeros(shape[:2])
        images = torch.stack([self._episode(index) for index in indices.tolist()])
        return images.float().div_(BRIGHTEST), self.targets.repeat(len(indices), 1)

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
