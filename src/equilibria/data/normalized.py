"""A source with every channel brought to mean 0 and variance 1."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equilibria.data.augment import Normalize
from equilibria.data.source import Source, known_labels


@dataclass(frozen=True)
class Normalized:
    """The images of a source, normalized as they are fetched."""

    source: Source
    normalize: Normalize

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.source.fetch(indices)
        return self.normalize(images), labels

    @property
    def labels(self) -> Tensor | None:
        """The labels, if the source knows them without reading images."""
        return known_labels(self.source)
