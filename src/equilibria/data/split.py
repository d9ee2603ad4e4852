"""Labelled images in memory, and how to part them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from equilibria.data.source import Selection, Source, known_labels

BRIGHTEST = 255.0


@dataclass(frozen=True)
class Split:
    """Images, shape `(samples, channels, height, width)`, and their labels, shape `(samples,)`.

    Images are float in [0, 1], or uint8 from 0 to 255, which take a quarter of the memory and
    become float32 in `fetch`. A label may also be a map, one label a pixel.
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
        """The samples of these indices; bytes become float32 in [0, 1]."""
        images = self.images[indices]
        if images.dtype == torch.uint8:
            images = images.float().div_(BRIGHTEST)
        return images, self.labels[indices].long()

    def subset(self, indices: Tensor) -> Split:
        return Split(self.images[indices], self.labels[indices])


def read_into_memory(source: Source, *, batch: int = 256) -> Split:
    """All samples of a source that reads files, as bytes: read once instead of in every epoch."""
    parts = torch.split(torch.arange(len(source)), batch)
    images, labels = zip(*(_as_bytes(*source.fetch(part)) for part in parts), strict=True)
    return Split(torch.cat(images), torch.cat(labels))


def _as_bytes(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    small = labels.numel() == 0 or (int(labels.min()) >= 0 and int(labels.max()) <= BRIGHTEST)
    return (images * BRIGHTEST).round().to(torch.uint8), labels.byte() if small else labels


@overload
def stratified_split(split: Split, share: float, seed: int) -> tuple[Split, Split]: ...


@overload
def stratified_split(split: Source, share: float, seed: int) -> tuple[Source, Source]: ...


def stratified_split(split: Source, share: float, seed: int) -> tuple[Source, Source]:
    """Part off `share` of the samples of every class: what remains, and what was held out.

    Without known classes, of all samples.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, not {share}")
    labels = known_labels(split)
    if labels is None:
        labels = torch.zeros(len(split), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(split), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        held_out[members[order[: round(share * len(members))]]] = True
    return select(split, (~held_out).nonzero().squeeze(1)), select(
        split, held_out.nonzero().squeeze(1)
    )


def select(source: Source, indices: Tensor) -> Source:
    """Some samples: a copy of those in memory, so that it holds no others; else a view."""
    return source.subset(indices) if isinstance(source, Split) else Selection(source, indices)
