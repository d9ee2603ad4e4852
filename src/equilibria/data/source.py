"""Samples by index, in memory or on disk: data sets, and how to part them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from equilibria.data.image_files import as_pixels, read_pixels
from equilibria.images import AS_ON_DISK, Framing, Kind
from equilibria.registry import check_not_negative, check_open_share

AnySource = TypeVar("AnySource", "Split", "Source")
"""Of samples in memory some are samples in memory."""

SAMPLED_FILES, SAMPLED_IMAGES = 4096, 256
"""Of how many files and images of a part a fingerprint looks at sizes and pixels."""


class Source(Protocol):
    """Samples by index, in memory or on disk.

    Examples:
        >>> test = eq.data.load_digits().test
        >>> len(test), test.fetch(torch.tensor([0]))[0].shape
        (450, torch.Size([1, 1, 8, 8]))
    """

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images as float32 in [0, 1], shape `(B, C, H, W)`, and labels as int64.

        Labels have shape `(B,)`, or `(B, H, W)` where every pixel has its own. Calls from several
        threads at once must be safe.
        """
        ...


@dataclass(frozen=True)
class Selection:
    """Some samples of a source, in the order of `indices`.

    Examples:
        >>> test = eq.data.load_digits().test
        >>> few = eq.data.Selection(test, torch.tensor([5, 7]))
        >>> len(few), few.fetch(torch.tensor([1]))[1].equal(test.labels[7:8])
        (2, True)
    """

    source: Source
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels by index into the selection."""
        return self.source.fetch(self.indices[indices])

    @property
    def labels(self) -> Tensor | None:
        """The labels, if the source knows them without reading images."""
        labels = known_labels(self.source)
        return None if labels is None else labels[self.indices]


@dataclass(frozen=True)
class Split:
    """Images, shape `(samples, channels, height, width)`, and their labels, shape `(samples,)`.

    Images are float in [0, 1], or uint8 from 0 to 255, which take a quarter of the memory and
    become float32 in `fetch`. A label may also be a map, one label a pixel.

    Examples:
        >>> split = eq.data.Split(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))
        >>> len(split)
        4
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.shape[0] != self.labels.shape[0]:
            raise ValueError(
                f"{self.images.shape[0]} images but {self.labels.shape[0]} labels: "
                "give one label an image"
            )

    def __len__(self) -> int:
        return self.images.shape[0]

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, pixels in [0, 1], and their labels by index."""
        return as_pixels(self.images[indices]), self.labels[indices].long()

    def subset(self, indices: Tensor) -> Split:
        """Return the samples at `indices` as a split."""
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class DataSet:
    """A data set with its held-out part. Choose settings on a piece of `train`, never on `test`.

    A part may be empty: CIFAR-10-C has nothing to train on. Labels of unlabelled images are zero.

    Examples:
        >>> digits = eq.data.load_digits()
        >>> len(digits.train), len(digits.test), digits.class_names[:3]
        (1347, 450, ('0', '1', '2'))
    """

    name: str
    train: Source
    test: Source
    class_names: tuple[str, ...]
    kind: Kind = "classification"
    validation: Source | None = None
    """A part of its own for choosing settings, where the authors of the data set made one."""
    mean: tuple[float, ...] | None = None
    """Of every channel of the training images, as published; None if nobody did."""
    std: tuple[float, ...] | None = None
    ignore_index: int | None = None
    """The label of pixels that count neither in training nor in testing."""
    license: str = ""
    framing: Framing = AS_ON_DISK
    """How its image files are brought to one size."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        source = self.train if len(self.train) else self.test
        base, _ = behind_selections(source, torch.arange(0))
        known: tuple[int, int, int] | None = getattr(base, "image_shape", None)
        if known is not None:
            return known
        first, _ = source.fetch(torch.zeros(1, dtype=torch.long))
        # An episode is a sample of many images.
        channels, height, width = first.shape[-3:]
        return channels, height, width

    @property
    def channels(self) -> int:
        """Number of channels per image."""
        return self.image_shape[0]

    @property
    def frame(self) -> Framing:
        """How a new image gets the size of these; where they come in one size, that is covered."""
        return self.framing if self.framing.size else Framing(self.image_shape[1:])

    def read_pixels(self, path: Path) -> Tensor:
        """A new image file as `fetch` would give it, shape `(C, H, W)`: for prediction.

        Gray or color, scaled and cut as the data set's own; one of their size is unchanged.
        """
        return read_pixels(path, self.frame, is_gray=self.channels == 1)


def check_subclasses(subclasses: str, labels_are_groups: bool, groups: str) -> None:
    """An option of data sets whose classes fall into groups: which of them there are."""
    if subclasses not in ("all", "known", "unseen"):
        raise ValueError(f"subclasses must be 'all', 'known' or 'unseen', not {subclasses!r}")
    if subclasses != "all" and not labels_are_groups:
        raise ValueError(
            f"subclasses={subclasses!r} needs the groups as labels: set labels={groups!r}"
        )


def known_labels(source: Source) -> Tensor | None:
    """The classes of all samples, where they are known without reading an image.

    Examples:
        >>> from equilibria.data.source import known_labels
        >>> known_labels(eq.data.load_digits().test).shape
        torch.Size([450])
    """
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
    shuffled, rank = labels[order], torch.empty_like(order)
    for label, place in zip(classes.tolist(), turn.tolist(), strict=True):
        members = shuffled == label
        rank[members] = torch.arange(int(members.sum())) * len(classes) + place
    return order[rank.argsort()[:samples]].sort().values


def evenly_spread(source: Source, count: int) -> Tensor:
    """The indices of at most `count` samples, from the first to the last.

    Examples:
        >>> from equilibria.data.source import evenly_spread
        >>> evenly_spread(eq.data.load_digits().test, 2)
        tensor([  0, 449])
    """
    count = min(count, len(source))
    return torch.linspace(0, len(source) - 1, count).round().long()


def read_samples(source: Source, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The samples in bytes where the source has them so, otherwise as `fetch` gives them."""
    source, indices = behind_selections(source, indices)
    read: Callable[[Tensor], tuple[Tensor, Tensor]] = getattr(source, "read", source.fetch)
    return read(indices)


def behind_selections(source: Source, indices: Tensor) -> tuple[Source, Tensor]:
    """Where the samples are, and which they are there."""
    while isinstance(source, Selection):
        indices, source = source.indices[indices], source.source
    return source, indices


def fingerprint(source: Source) -> str:
    """The number of samples, and a digest of them that the same files give on every machine.

    It is of all labels that are known, and of files all names and some sizes, of others some
    samples: quick, so that not every change shows, but samples that are missing or added do.

    Examples:
        >>> test = eq.data.load_digits().test
        >>> eq.data.fingerprint(test) == eq.data.fingerprint(test)
        True
    """
    digest = hashlib.sha256()
    labels = known_labels(source)
    if labels is not None:
        digest.update(labels.long().numpy().tobytes())
    base, indices = behind_selections(source, torch.arange(len(source)))
    paths: Sequence[Path | str] | None = getattr(base, "paths", None)
    some = indices[evenly_spread(source, SAMPLED_FILES if paths else SAMPLED_IMAGES)]
    if paths is None:
        digest.update(base.fetch(some)[0].numpy().tobytes())
    else:
        for index in indices.tolist():
            # Without the folders above the data set, which may move.
            name = "/".join(["", *str(paths[index]).split(os.sep)[-2:]])
            digest.update(name.encode(errors="surrogateescape"))
        for path in (paths[index] for index in some.tolist()):
            digest.update(b"%d " % (os.path.getsize(path) if os.path.exists(path) else -1))
    return f"{len(source)} samples, {digest.hexdigest()[:16]}"


def stratified_split(
    split: AnySource, share: float, seed: int, *, least: int = 0
) -> tuple[AnySource, AnySource]:
    """Part off `share` of the samples of every class: what remains, and what was held out.

    Without known classes, of all samples. `least` are held out of every class, but for its last.

    Examples:
        >>> rest, held_out = eq.data.stratified_split(eq.data.load_digits().train, 0.1, seed=0)
        >>> len(rest), len(held_out)
        (1211, 136)
    """
    check_open_share(share=share)
    check_not_negative(least=least)
    labels = known_labels(split)
    if labels is None:
        labels = torch.zeros(len(split), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(split), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        wanted = round(share * len(members))
        if least:
            wanted = min(max(least, wanted), len(members) - 1)
        held_out[members[order[:wanted]]] = True
    rest, aside = (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)
    if not len(rest) or not len(aside):
        raise ValueError(
            f"a share of {share} holds out {len(aside)} of {len(split)} samples (it is rounded for "
            "every class): give one that leaves samples on both sides"
        )
    return select(split, rest), select(split, aside)


def select(source: AnySource, indices: Tensor) -> AnySource:
    """Some samples: a copy of those in memory, so that it holds no others; else a view."""
    return source.subset(indices) if isinstance(source, Split) else Selection(source, indices)
