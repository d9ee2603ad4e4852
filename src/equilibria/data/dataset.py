"""A data set: its parts and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias

import torch

from equilibria.data.source import Source
from equilibria.data.split import Split

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    S = TypeVar("S", bound=Source, covariant=True, default=Split)
else:
    from typing import TypeVar

    S = TypeVar("S", bound=Source, covariant=True)

Kind: TypeAlias = Literal["classification", "segmentation", "episodes", "unlabelled"]


@dataclass(frozen=True)
class DataSet(Generic[S]):
    """A data set with its held-out part. Choose settings on a piece of `train`, never on `test`.

    A part may be empty: CIFAR-10-C has nothing to train on. Labels of unlabelled images are zero.
    """

    name: str
    train: S
    test: S
    class_names: tuple[str, ...]
    kind: Kind = "classification"
    validation: S | None = None
    """A part of its own for choosing settings, where the authors of the data set made one."""
    mean: tuple[float, ...] | None = None
    """Of every channel of the training images, as published; None if nobody did."""
    std: tuple[float, ...] | None = None
    ignore_index: int | None = None
    """The label of pixels that count neither in training nor in testing."""
    license: str = ""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        source: Source = self.train if len(self.train) else self.test
        if isinstance(source, Split):
            _, channels, height, width = source.images.shape
        else:
            # An episode is a sample of many images.
            first, _ = source.fetch(torch.zeros(1, dtype=torch.long))
            channels, height, width = first.shape[-3:]
        return channels, height, width

    @property
    def channels(self) -> int:
        return self.image_shape[0]
