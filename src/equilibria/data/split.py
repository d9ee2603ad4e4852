"""Labelled images, and how to part them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images, shape `(samples, channels, height, width)`, and their labels, shape `(samples,)`."""

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

    def subset(self, indices: Tensor) -> Split:
        return Split(self.images[indices], self.labels[indices])


def stratified_split(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """Part off `share` of the samples of every class: what remains, and what was held out."""
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, not {share}")
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(split), dtype=torch.bool)
    for label in torch.unique(split.labels).tolist():
        members = (split.labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(members), generator=generator)
        held_out[members[order[: round(share * len(members))]]] = True
    return split.subset(~held_out), split.subset(held_out)
