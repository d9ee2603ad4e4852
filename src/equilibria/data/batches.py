"""A split in batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from equilibria.data.split import Split


class Batches:
    """Goes through every sample of a split once; in a new order each time if `shuffle` is given."""

    def __init__(self, split: Split, size: int, *, shuffle: torch.Generator | None = None) -> None:
        if size < 1:
            raise ValueError(f"the batch size must be at least 1, not {size}")
        self.split = split
        self.size = size
        self.shuffle = shuffle

    def __len__(self) -> int:
        return -(-len(self.split) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = len(self.split)
        order = (
            torch.arange(samples)
            if self.shuffle is None
            else torch.randperm(samples, generator=self.shuffle)
        )
        for indices in torch.split(order, self.size):
            yield self.split.images[indices], self.split.labels[indices]
