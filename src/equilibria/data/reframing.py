"""Conversion of images to the size and channels of another data set."""

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
    """Source whose images are converted to gray or color, scaled and cropped.

    Attributes:
        source: The samples.
        framing: Size that images are scaled and cropped to.
        is_gray: Whether images have one channel instead of three.
    """

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
            raise ValueError("label maps cannot be resized here: set data.options.size")
        framed = [self._frame(image) for image in images]
        return torch.stack(framed) if framed else images, labels

    def _frame(self, image: Tensor) -> Tensor:
        converted = image_from_tensor(image).convert("L" if self.is_gray else "RGB")
        return as_pixels(image_to_tensor(self.framing.apply(converted)))


def reframed(source: Source, framing: Framing, image_shape: Sequence[int]) -> Source:
    """Return the source with images of another shape; files are read at that size.

    Args:
        source: The samples.
        framing: Size that images are scaled and cropped to.
        image_shape: Channels, height and width of the result.

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
