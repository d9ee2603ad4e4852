"""A source in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from equilibria.data.source import Source


class Batches:
    """Goes through every sample of a source once; in a new order each time with `shuffle`.

    `drop_last` leaves out a last batch that is not full. With `prefetch`, a thread reads so many
    batches ahead; the batches are the same ones.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        *,
        shuffle: torch.Generator | None = None,
        drop_last: bool = False,
        prefetch: int = 0,
    ) -> None:
        if size < 1:
            raise ValueError(f"the batch size must be at least 1, not {size}")
        if prefetch < 0:
            raise ValueError(f"prefetch is a number of batches, 0 for none, not {prefetch}")
        self.source = source
        self.size = size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.prefetch = prefetch

    def __len__(self) -> int:
        samples = len(self.source)
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = len(self.source)
        order = (
            torch.arange(samples)
            if self.shuffle is None
            else torch.randperm(samples, generator=self.shuffle)
        )
        # An empty tensor splits into one empty piece, which is no batch.
        parts = islice(torch.split(order, self.size), len(self))
        if self.prefetch:
            yield from self._read_ahead(parts)
        else:
            yield from map(self.source.fetch, parts)

    def _read_ahead(self, parts: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        with ThreadPoolExecutor(1, thread_name_prefix="equilibria-prefetch") as reader:
            ahead = deque(
                reader.submit(self.source.fetch, part) for part in islice(parts, self.prefetch)
            )
            try:
                while ahead:
                    batch = ahead.popleft().result()
                    for part in islice(parts, 1):
                        ahead.append(reader.submit(self.source.fetch, part))
                    yield batch
            finally:
                for unread in ahead:
                    unread.cancel()
