"""Batches of a source, read in place or ahead by worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from equilibria.context.caller import warn_caller
from equilibria.data.file_sources import ImageFiles
from equilibria.data.image_files import as_pixels
from equilibria.data.readers import DataFileError
from equilibria.data.source import Selection, Source, Split, behind_selections, read_samples
from equilibria.data.workers import START, begin_worker, portable
from equilibria.registry import check_values

NAMED_PROBLEMS = 5
"""Images that cannot be read are named one by one up to here; after that they are counted."""


class UnreadableImageWarning(UserWarning):
    """An image that cannot be read, and is left out."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Goes through every sample of a source once; in a new order each time with `shuffle`.

    `part` = (k, n) gives the k-th of n parts of every batch, which differ by one sample at most and
    may be empty. So many `workers` are processes that read ahead, and stay as long as this object;
    the batches are the same ones. `pinned` puts them into memory from which a GPU can copy while it
    computes.

    Of a source that says so, images that cannot be read are left out, with a warning.

    Examples:
        >>> batches = eq.data.Batches(eq.data.load_digits().test, 100)
        >>> images, labels = next(iter(batches))
        >>> images.shape, len(batches)
        (torch.Size([100, 1, 8, 8]), 5)
    """

    source: Source
    size: int
    _: KW_ONLY
    shuffle: torch.Generator | None = None
    part: tuple[int, int] = (0, 1)
    workers: int = 0
    pinned: bool = False

    def __post_init__(self) -> None:
        check_values(self, at_least_one=("size",), not_negative=("workers",))
        if not 0 <= self.part[0] < self.part[1]:
            raise ValueError(f"part is (k, n) with 0 ≤ k < n, not {self.part}")

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, images, labels in self.indexed():
            if len(images):
                yield images, labels

    def indexed(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches with the indices of their samples before them; also those without samples."""
        for batch in self.read():
            yield batch.indices, as_pixels(batch.images), batch.labels.long()

    def read(self) -> Iterator[_Batch]:
        """The batches as they are read, images in bytes where the source has them so."""
        with warnings.catch_warnings():
            # Of a fork beside other threads: `START` says why.
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            found = iter(self._loader)
        for batch in found:
            if batch.error is not None:
                # Workers end here: a traceback, which keeps this frame, would keep them.
                del found
                self.__dict__.pop("_loader")
                raise batch.error
            self._tell(batch.problems)
            yield batch

    def _tell(self, problems: list[DataFileError]) -> None:
        known = unreadable_images(self.source)
        for problem in problems:
            if str(problem.path) in known:
                continue
            known[str(problem.path)] = problem
            if len(known) <= NAMED_PROBLEMS:
                rest = "; others will be counted" if len(known) == NAMED_PROBLEMS else ""
                warn_caller(f"left out: {problem}{rest}", UnreadableImageWarning)

    @cached_property
    def _order(self) -> _Order:
        return _Order(len(self.source), self.size, self.shuffle, self.part)

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        with warnings.catch_warnings():
            # Who asks for more workers than cores gets them.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return DataLoader(
                _Reader(self.source),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._order,
                num_workers=self.workers,
                worker_init_fn=begin_worker,
                persistent_workers=self.workers > 0,
                pin_memory=self.pinned,
                multiprocessing_context=START if self.workers else None,
                # It draws a seed for workers, of which torch's own generator shall know nothing.
                generator=torch.Generator(),
            )


def read_into_memory(
    source: Source,
    *,
    batch: int = 64,
    workers: int = 0,
    on_read: Callable[[int, int], None] | None = None,
) -> Split:
    """All samples of a source that reads files, as bytes: read once instead of in every epoch.

    on_read: is told how many of how many samples have been read.

    Examples:
        >>> pairs = [(torch.rand(1, 4, 4), 3), (torch.rand(1, 4, 4), 1)]
        >>> from equilibria.data.batches import read_into_memory
        >>> from equilibria.data.items import Items
        >>> read_into_memory(Items(pairs)).labels.tolist()
        [3, 1]
    """
    parts = []
    for part in Batches(source, batch, workers=workers).read():
        parts.append(part)
        if on_read is not None:
            on_read(min(batch * len(parts), len(source)), len(source))
    labels = torch.cat([part.labels for part in parts])
    # Of labels, maps have many.
    fit_bytes = torch.equal(labels.byte().to(labels.dtype), labels)
    return Split(torch.cat([part.images for part in parts]), labels.byte() if fit_bytes else labels)


def fetch_readable(source: Source, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and labels like `source.fetch`, without the images that `Batches` leaves out.

    Args:
        source: Where the samples are.
        indices: Which of them.

    Raises:
        DataFileError: If none of them can be read.

    Examples:
        >>> from equilibria.data.batches import fetch_readable
        >>> images, labels = fetch_readable(eq.data.load_digits().test, torch.tensor([0, 7]))
        >>> images.shape
        torch.Size([2, 1, 8, 8])
    """
    for images, labels in Batches(Selection(source, indices), max(1, len(indices))):
        return images, labels
    return source.fetch(indices)


def unreadable_images(source: Source) -> dict[str, DataFileError]:
    """The images of a source that could not be read so far, by path.

    Examples:
        >>> from equilibria.data.batches import unreadable_images
        >>> unreadable_images(eq.data.load_digits().test)
        {}
    """
    base, _ = behind_selections(source, torch.arange(0))
    return base.unreadable if isinstance(base, ImageFiles) else {}


@dataclass(frozen=True)
class _Order:
    """The indices of every batch: drawn in one process, whoever reads the samples."""

    samples: int
    size: int
    shuffle: torch.Generator | None
    part: tuple[int, int]

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.arange(self.samples)
        if self.shuffle is not None:
            order = torch.randperm(self.samples, generator=self.shuffle)
        place, parts = self.part
        # An empty tensor splits into one empty piece, which is no batch.
        for batch in islice(torch.split(order, self.size), len(self)):
            yield batch.tensor_split(parts)[place]


@dataclass
class _Batch:
    """Samples as they were read.

    From a worker they come as arrays through a pipe: tensors would come through shared memory, of
    which containers have little.
    """

    indices: Tensor = field(default_factory=lambda: torch.arange(0))
    images: Tensor = field(default_factory=lambda: torch.zeros(0))
    labels: Tensor = field(default_factory=lambda: torch.arange(0))
    problems: list[DataFileError] = field(default_factory=list)
    error: Exception | None = None

    def __reduce__(self) -> Any:
        tensors = (self.indices, self.images, self.labels)
        return _received, ([tensor.numpy() for tensor in tensors], self.problems, self.error)

    def pin_memory(self, *_: Any) -> _Batch:
        images, labels = self.images.pin_memory(), self.labels.pin_memory()
        return replace(self, images=images, labels=labels)


def _received(arrays: list[Any], problems: list[DataFileError], error: Exception | None) -> _Batch:
    indices, images, labels = map(torch.from_numpy, arrays)
    return _Batch(indices, images, labels, problems, error)


@dataclass(frozen=True)
class _Reader:
    """Reads a batch, here or in a worker."""

    source: Source

    def __getitem__(self, indices: Tensor) -> _Batch:
        try:
            base, places = behind_selections(self.source, indices)
            if isinstance(base, ImageFiles) and base.skips_unreadable:
                kept, images, labels, problems = base.read_readable(places)
                return _Batch(indices[kept], images, labels, problems)
            return _Batch(indices, *read_samples(base, places))
        except Exception as error:
            if get_worker_info() is None:
                raise
            # Torch would wrap it into a text with a traceback.
            return _Batch(error=portable(error))
