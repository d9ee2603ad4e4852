"""A source in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from itertools import islice

import torch
from torch import Tensor

from equilibria.data.source import Source


@dataclass(frozen=True, eq=False)
class Batches:
    """Goes through every sample of a source once; in a new order each time with `shuffle`.

    `drop_last` leaves out a last batch that is not full. With `prefetch`, a thread reads so many
    batches ahead; the batches are the same ones. `part` = (k, n) gives the k-th of n parts of every
    batch, which differ by one sample at most and may be empty.
    """

    source: Source
    size: int
    _: KW_ONLY
    shuffle: torch.Generator | None = None
    drop_last: bool = False
    prefetch: int = 0
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"the batch size must be at least 1, not {self.size}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is a number of batches, 0 for none, not {self.prefetch}")
        if not 0 <= self.part[0] < self.part[1]:
            raise ValueError(f"part is (k, n) with 0 ≤ k < n, not {self.part}")

    def __len__(self) -> int:
        samples = len(self.source)
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, images, labels in self.indexed():
            yield images, labels

    def indexed(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches with the indices of their samples before them."""
        samples = len(self.source)
        order = (
            torch.arange(samples)
            if self.shuffle is None
            else torch.randperm(samples, generator=self.shuffle)
        )
        place, parts = self.part
        # An empty tensor splits into one empty piece, which is no batch.
        whole = islice(torch.split(order, self.size), len(self))
        wanted = (batch.tensor_split(parts)[place] for batch in whole)
        yield from self._read_ahead(wanted) if self.prefetch else map(self._read, wanted)

    def _read(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return indices, *self.source.fetch(indices)

    def _read_ahead(self, wanted: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        with ThreadPoolExecutor(1, thread_name_prefix="equilibria-prefetch") as reader:
            ahead = deque(
                reader.submit(self._read, indices) for indices in islice(wanted, self.prefetch)
            )
            try:
                while ahead:
                    batch = ahead.popleft().result()
                    for indices in islice(wanted, 1):
                        ahead.append(reader.submit(self._read, indices))
                    yield batch
            finally:
                for unread in ahead:
                    unread.cancel()
