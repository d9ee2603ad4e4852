"""What batches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """Samples by index, in memory or on disk."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images as float32 in [0, 1], shape `(B, C, H, W)`, and labels as int64.

        Labels have shape `(B,)`, or `(B, H, W)` where every pixel has its own. Calls from several
        threads at once must be safe.
        """
        ...


@dataclass(frozen=True)
class Selection:
    """Some samples of a source, in the order of `indices`."""

    source: Source
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.source.fetch(self.indices[indices])

    @property
    def labels(self) -> Tensor | None:
        """The labels, if the source knows them without reading images."""
        labels = known_labels(self.source)
        return None if labels is None else labels[self.indices]


def known_labels(source: Source) -> Tensor | None:
    """The classes of all samples, where they are known without reading an image."""
    labels = getattr(source, "labels", None)
    return labels if isinstance(labels, Tensor) and labels.dim() == 1 else None


def choose_samples(source: Source, samples: int, seed: int) -> Tensor:
    """Indices of `samples` samples, ascending; as many of each class as there are to be had."""
    if not 1 <= samples <= len(source):
        raise ValueError(
            f"cannot choose {samples} samples of {len(source)}: "
            f"ask for a number from 1 to {len(source)}"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(source), generator=generator)
    labels = known_labels(source)
    if labels is None:
        return order[:samples].sort().values
    classes = torch.unique(labels)
    # Where the number is no multiple of the classes, chance says which of them get one more.
    turn = torch.randperm(len(classes), generator=generator)
    place = turn[torch.searchsorted(classes, labels[order].contiguous())]
    by_place = place.argsort(stable=True)
    first = torch.bincount(place).cumsum(0) - torch.bincount(place)
    rank = torch.empty_like(place)
    rank[by_place] = torch.arange(len(place)) - first[place[by_place]]
    key = rank * len(classes) + place
    return order[key.argsort()[:samples]].sort().values


def evenly_spread(source: Source, count: int) -> Tensor:
    """The indices of at most `count` samples, from the first to the last."""
    count = min(count, len(source))
    return torch.linspace(0, len(source) - 1, count).round().long()
