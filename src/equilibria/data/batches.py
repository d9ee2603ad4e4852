"""Batches of a source, read in this process or ahead of time by worker processes."""

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
from equilibria.data.workers import START_METHOD, begin_worker, picklable
from equilibria.registry import check_values

MAX_WARNINGS = 5
"""Number of unreadable images that are reported one by one; further ones are counted."""


class UnreadableImageWarning(UserWarning):
    """An image cannot be read and is skipped."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of a source; an iteration visits every sample once.

    If the source has `skips_unreadable` set, images that cannot be read are skipped with a warning.

    Args:
        source: The samples.
        size: Number of samples per batch; the last batch may be smaller.
        shuffle: Random generator that draws a new order for every iteration; None keeps the order
            of the source.
        part: A pair (k, n), with which the k-th of n parts of every batch is yielded. Parts differ
            by at most one sample and may be empty.
        workers: Number of processes that read ahead; they live as long as this object. The batches
            do not depend on it.
        pinned: Whether batches are in pinned memory, which a GPU copies while it computes.

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
            raise ValueError(f"part must be (k, n) with 0 ≤ k < n, got {self.part}")

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, images, labels in self.indexed():
            if len(images):
                yield images, labels

    def indexed(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (indices, images, labels) for every batch, including empty ones."""
        for batch in self.read():
            yield batch.indices, as_pixels(batch.images), batch.labels.long()

    def read(self) -> Iterator[_Batch]:
        """Yield batches as they are read, with images as bytes if the source has bytes."""
        with warnings.catch_warnings():
            # Python warns of forks in processes with several threads; `START_METHOD` explains
            # why this one is safe.
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            batches = iter(self._loader)
        for batch in batches:
            if batch.error is not None:
                # The traceback keeps this frame alive, and the iterator would keep the workers.
                del batches
                self.__dict__.pop("_loader")
                raise batch.error
            self._report(batch.problems)
            yield batch

    def _report(self, problems: list[DataFileError]) -> None:
        reported = unreadable_images(self.source)
        for problem in problems:
            if str(problem.path) in reported:
                continue
            reported[str(problem.path)] = problem
            if len(reported) <= MAX_WARNINGS:
                rest = "; further ones are only counted" if len(reported) == MAX_WARNINGS else ""
                warn_caller(f"skipped: {problem}{rest}", UnreadableImageWarning)

    @cached_property
    def _order(self) -> _Order:
        return _Order(len(self.source), self.size, self.shuffle, self.part)

    @cached_property
    def _loader(self) -> DataLoader[Any]:
        with warnings.catch_warnings():
            # PyTorch warns of more workers than cores; the user's choice stands.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return DataLoader(
                _Reader(self.source),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._order,
                num_workers=self.workers,
                worker_init_fn=begin_worker,
                persistent_workers=self.workers > 0,
                pin_memory=self.pinned,
                multiprocessing_context=START_METHOD if self.workers else None,
                # The loader draws a seed for its workers, which must not advance torch's generator.
                generator=torch.Generator(),
            )


def read_into_memory(
    source: Source,
    *,
    batch: int = 64,
    workers: int = 0,
    on_read: Callable[[int, int], None] | None = None,
) -> Split:
    """Read all samples of a source of files into memory, with images as bytes.

    Args:
        source: The samples.
        batch: Number of samples that are read at once.
        workers: Number of processes that read.
        on_read: Callback for progress, called with the number of samples read and of all samples.

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
    # Label maps in 8 bytes per pixel would take more memory than the images.
    fits_bytes = torch.equal(labels.byte().to(labels.dtype), labels)
    images = torch.cat([part.images for part in parts])
    return Split(images, labels.byte() if fits_bytes else labels)


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
    """Return the errors of the images of a source that were skipped so far, by path.

    Args:
        source: The samples.

    Examples:
        >>> from equilibria.data.batches import unreadable_images
        >>> unreadable_images(eq.data.load_digits().test)
        {}
    """
    base, _ = behind_selections(source, torch.arange(0))
    return base.unreadable if isinstance(base, ImageFiles) else {}


@dataclass(frozen=True)
class _Order:
    """Indices of every batch. They are drawn in this process even if workers read the samples."""

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
        # `torch.split` returns one empty piece for an empty tensor; `islice` drops it.
        for batch in islice(torch.split(order, self.size), len(self)):
            yield batch.tensor_split(parts)[place]


@dataclass
class _Batch:
    """Samples as they were read.

    Workers send arrays through a pipe. Tensors would go through shared memory, which is scarce in
    containers.
    """

    indices: Tensor = field(default_factory=lambda: torch.arange(0))
    images: Tensor = field(default_factory=lambda: torch.zeros(0))
    labels: Tensor = field(default_factory=lambda: torch.arange(0))
    problems: list[DataFileError] = field(default_factory=list)
    error: Exception | None = None

    def __reduce__(self) -> Any:
        tensors = (self.indices, self.images, self.labels)
        return _from_arrays, ([tensor.numpy() for tensor in tensors], self.problems, self.error)

    def pin_memory(self, *_: Any) -> _Batch:
        images, labels = self.images.pin_memory(), self.labels.pin_memory()
        return replace(self, images=images, labels=labels)


def _from_arrays(
    arrays: list[Any], problems: list[DataFileError], error: Exception | None
) -> _Batch:
    indices, images, labels = map(torch.from_numpy, arrays)
    return _Batch(indices, images, labels, problems, error)


@dataclass(frozen=True)
class _Reader:
    """Reader of batches, in this process or in a worker."""

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
            # PyTorch would replace the exception by one that contains a formatted traceback.
            return _Batch(error=picklable(error))
