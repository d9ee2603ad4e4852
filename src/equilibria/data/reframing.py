"""The images of one data set in the frame of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.data.file_sources import ImageFiles, SegmentedFiles
from equilibria.data.image_files import as_pixels, image_from_tensor, image_to_tensor
from equilibria.data.source import Selection, Source
from equilibria.images import Framing


@dataclass(frozen=True)
class Reframed:
    """A source whose images are made gray or colored, scaled and cut."""

    source: Source
    framing: Framing
    is_gray: bool

    def __len__(self) -> int:
        return len(self.source)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        return (1 if self.is_gray else 3, *self.framing.size) if self.framing.size else None

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.source.fetch(indices)
        if labels.dim() > 1:
            raise ValueError("maps of labels are framed where they are read: set the data's size")
        framed = [self._framed(image) for image in images]
        return torch.stack(framed) if framed else images, labels

    def _framed(self, image: Tensor) -> Tensor:
        picture = image_from_tensor(image).convert("L" if self.is_gray else "RGB")
        return as_pixels(image_to_tensor(self.framing.apply(picture)))


def reframed(source: Source, framing: Framing, image_shape: Sequence[int]) -> Source:
    """The source with images of this shape (channels, height, width); files are read so.

    Examples:
        >>> digits = eq.data.load_digits().test
        >>> from equilibria.data.reframing import reframed
        >>> larger = reframed(digits, eq.data.Framing(size=(16, 16)), (1, 16, 16))
        >>> larger.fetch(torch.tensor([0]))[0].shape
        torch.Size([1, 1, 16, 16])
    """
    is_gray = image_shape[0] == 1
    if isinstance(source, Selection):
        return Selection(reframed(source.source, framing, image_shape), source.indices)
    if isinstance(source, ImageFiles):
        return replace(source, framing=framing, is_gray=is_gray)
    if isinstance(source, SegmentedFiles) and not is_gray:
        return replace(source, framing=framing)
    if not len(source) or _shape(source) == tuple(image_shape):
        return source
    return Reframed(source, framing, is_gray)


def _shape(source: Source) -> tuple[int, ...]:
    return tuple(source.fetch(torch.zeros(1, dtype=torch.long))[0].shape[1:])
