"""Data sets and their sources of samples, in memory or on disk, and how to split them."""

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
"""Type of a source; the selection of a split is a split."""

SAMPLED_FILES, SAMPLED_IMAGES = 4096, 256
"""Number of files whose sizes, and of images whose pixels, enter a fingerprint."""


class Source(Protocol):
    """Samples by index, in memory or on disk.

    Examples:
        >>> test = eq.data.load_digits().test
        >>> len(test), test.fetch(torch.tensor([0]))[0].shape
        (450, torch.Size([1, 1, 8, 8]))
    """

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples; must be safe to call from several threads at once.

        Args:
            indices: Indices of the samples, shape (B,).

        Returns:
            Images as float32 in [0, 1], shape (B, C, H, W), and labels as int64, shape (B,), or
            (B, H, W) for label maps.
        """
        ...


@dataclass(frozen=True)
class Selection:
    """A subset of a source, without copying samples.

    Attributes:
        source: The samples.
        indices: Indices of the selected samples, in the order of the selection.

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
        """Return the images and labels of some samples of the selection.

        Args:
            indices: Indices into the selection, shape (B,).
        """
        return self.source.fetch(self.indices[indices])

    @property
    def labels(self) -> Tensor | None:
        """Labels, if they are known without reading images."""
        labels = known_labels(self.source)
        return None if labels is None else labels[self.indices]


@dataclass(frozen=True)
class Split:
    """Images and labels in memory.

    Attributes:
        images: Shape (samples, C, H, W), float in [0, 1], or uint8 from 0 to 255. The latter take a
            quarter of the memory and become float32 in `fetch`.
        labels: Shape (samples,), or (samples, H, W) for label maps.

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
                "give one label per image"
            )

    def __len__(self) -> int:
        return self.images.shape[0]

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, pixels in [0, 1], and their labels.

        Args:
            indices: Indices of the samples, shape (B,).
        """
        return as_pixels(self.images[indices]), self.labels[indices].long()

    def subset(self, indices: Tensor) -> Split:
        """Return a copy of some samples.

        Args:
            indices: Indices of the samples.
        """
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class DataSet:
    """A data set with a training and a held-out test part.

    Choose settings on a part of `train`, never on `test`. A part may be empty: CIFAR-10-C has no
    training images. Labels of unlabelled images are zero.

    Attributes:
        name: Name of the data set.
        train: Samples to train on.
        test: Samples to test on.
        class_names: Names of the classes, in the order of the labels.
        kind: Kind of labels: "classification", "segmentation", "unlabelled" or "episodes".
        validation: Published part for choosing settings, if there is one.
        mean: Published mean per channel of the training images, if there is one.
        std: Published standard deviation per channel, if there is one.
        ignore_index: Label of pixels that are excluded from training and testing.
        license: License of the images.
        framing: Size that image files are scaled and cropped to.

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
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    ignore_index: int | None = None
    license: str = ""
    framing: Framing = AS_ON_DISK

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        source = self.train if len(self.train) else self.test
        base, _ = behind_selections(source, torch.arange(0))
        known: tuple[int, int, int] | None = getattr(base, "image_shape", None)
        if known is not None:
            return known
        first, _ = source.fetch(torch.zeros(1, dtype=torch.long))
        # A sample can be an episode, which has a dimension more.
        channels, height, width = first.shape[-3:]
        return channels, height, width

    @property
    def channels(self) -> int:
        """Number of channels per image."""
        return self.image_shape[0]

    @property
    def frame(self) -> Framing:
        """Scaling and cropping that gives a new image the size of these."""
        return self.framing if self.framing.size else Framing(self.image_shape[1:])

    def read_pixels(self, path: Path) -> Tensor:
        """Read a new image file for prediction, with the size and channels of the data set.

        Args:
            path: Image file.

        Returns:
            Pixels in [0, 1], shape (C, H, W).
        """
        return read_pixels(path, self.frame, is_gray=self.channels == 1)


def check_subclasses(subclasses: str, labels_are_groups: bool, groups: str) -> None:
    """Check the option `subclasses` of a data set whose classes form groups, such as CIFAR-100.

    Args:
        subclasses: "all", or the part of each group to load: "known" or "unseen" classes.
        labels_are_groups: Whether the labels are the groups instead of the classes.
        groups: Value of the option `labels` that selects the groups, for the error message.

    Raises:
        ValueError: If `subclasses` is unknown, or selects a part while the labels are classes.
    """
    if subclasses not in ("all", "known", "unseen"):
        raise ValueError(f"subclasses must be 'all', 'known' or 'unseen', got {subclasses!r}")
    if subclasses != "all" and not labels_are_groups:
        raise ValueError(
            f"subclasses={subclasses!r} needs the groups as labels: set labels={groups!r}"
        )


def known_labels(source: Source) -> Tensor | None:
    """Return the class of every sample, or None if images would have to be read.

    Args:
        source: The samples.

    Examples:
        >>> from equilibria.data.source import known_labels
        >>> known_labels(eq.data.load_digits().test).shape
        torch.Size([450])
    """
    labels = getattr(source, "labels", None)
    return labels if isinstance(labels, Tensor) and labels.dim() == 1 else None


def choose_samples(source: Source, samples: int, seed: int) -> Tensor:
    """Return the ascending indices of a random choice of samples, balanced over the classes."""
    if not 1 <= samples <= len(source):
        raise ValueError(
            f"the number of samples must be from 1 to {len(source)}, the size of this part, got "
            f"{samples}"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(source), generator=generator)
    labels = known_labels(source)
    if labels is None:
        return order[:samples].sort().values
    classes = torch.unique(labels)
    # If the number is not a multiple of the classes, a random choice of them get one more.
    class_order = torch.randperm(len(classes), generator=generator)
    shuffled, rank = labels[order], torch.empty_like(order)
    for label, position in zip(classes.tolist(), class_order.tolist(), strict=True):
        members = shuffled == label
        rank[members] = torch.arange(int(members.sum())) * len(classes) + position
    return order[rank.argsort()[:samples]].sort().values


def evenly_spread(source: Source, count: int) -> Tensor:
    """Return the indices of at most `count` evenly spaced samples, including the first and last.

    Args:
        source: The samples.
        count: Largest number of indices.

    Examples:
        >>> from equilibria.data.source import evenly_spread
        >>> evenly_spread(eq.data.load_digits().test, 2)
        tensor([  0, 449])
    """
    count = min(count, len(source))
    return torch.linspace(0, len(source) - 1, count).round().long()


def read_samples(source: Source, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples, with images as bytes if the source has bytes."""
    source, indices = behind_selections(source, indices)
    read: Callable[[Tensor], tuple[Tensor, Tensor]] = getattr(source, "read", source.fetch)
    return read(indices)


def behind_selections(source: Source, indices: Tensor) -> tuple[Source, Tensor]:
    """Return the source behind nested selections, and the indices of the samples in it."""
    while isinstance(source, Selection):
        indices, source = source.indices[indices], source.source
    return source, indices


def fingerprint(source: Source) -> str:
    """Return the number of samples and a digest, which are equal for equal data on all machines.

    The digest covers all labels. For files it covers all names and a sample of the sizes, for data
    in memory a sample of the images. It detects missing and additional samples, but not every
    change of an image.

    Args:
        source: The samples.

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
    sample = indices[evenly_spread(source, SAMPLED_FILES if paths else SAMPLED_IMAGES)]
    if paths is None:
        digest.update(base.fetch(sample)[0].numpy().tobytes())
    else:
        for index in indices.tolist():
            # Only the last two parts of the path, because the data set can be moved.
            name = "/".join(["", *str(paths[index]).split(os.sep)[-2:]])
            digest.update(name.encode(errors="surrogateescape"))
        for path in (paths[index] for index in sample.tolist()):
            digest.update(b"%d " % (os.path.getsize(path) if os.path.exists(path) else -1))
    return f"{len(source)} samples, {digest.hexdigest()[:16]}"


def stratified_split(
    split: AnySource, share: float, seed: int, *, least: int = 0
) -> tuple[AnySource, AnySource]:
    """Hold out a random share of the samples of every class, or of all samples without classes.

    Args:
        split: The samples.
        share: Share to hold out, in (0, 1).
        seed: Seed of the random choice.
        least: Smallest number of samples to hold out per class; at least one per class remains.

    Returns:
        The remaining and the held-out samples.

    Raises:
        ValueError: If one of the two parts would be empty.

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
        count = round(share * len(members))
        if least:
            count = min(max(least, count), len(members) - 1)
        held_out[members[order[:count]]] = True
    kept, removed = (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)
    if not len(kept) or not len(removed):
        raise ValueError(
            f"a share of {share} holds out {len(removed)} of {len(split)} samples (rounded per "
            "class): choose a share that leaves samples in both parts"
        )
    return select(split, kept), select(split, removed)


def select(source: AnySource, indices: Tensor) -> AnySource:
    """Return a subset: a copy of samples in memory, to free the others, and otherwise a view."""
    return source.subset(indices) if isinstance(source, Split) else Selection(source, indices)
