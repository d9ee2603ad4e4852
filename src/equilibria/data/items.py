"""Data sets from map-style `torch.utils.data.Dataset` objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from equilibria.data.image_files import as_pixels, image_to_tensor
from equilibria.data.sets.own import TEST_SEED, TEST_SHARE
from equilibria.data.source import DataSet, Source, Split, stratified_split
from equilibria.images import AS_ON_DISK, Framing


@dataclass(frozen=True)
class Items:
    """Source of the items (image, label) of a map-style `Dataset`.

    An image is a Pillow image, or a tensor of shape (C, H, W) or (H, W) with bytes or with
    floating-point numbers in [0, 1].

    Attributes:
        dataset: The data set.
        framing: Size that Pillow images are scaled and cropped to.
        is_gray: Whether Pillow images are converted to gray ones.

    Examples:
        >>> pairs = [(torch.rand(1, 4, 4), 3), (torch.rand(1, 4, 4), 1)]  # any map-style data set
        >>> from equilibria.data.items import Items
        >>> source = Items(pairs)
        >>> source.fetch(torch.tensor([1]))[1]
        tensor([1])
    """

    dataset: Any
    framing: Framing = AS_ON_DISK
    is_gray: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images, with pixels in [0, 1], and the labels of some items.

        Args:
            indices: Indices of the items, shape (B,).
        """
        items = [self.dataset[index] for index in indices.tolist()]
        images = [self._image(image) for image, _ in items]
        if any(image.shape != images[0].shape for image in images):
            shapes = sorted({tuple(image.shape) for image in images})
            raise ValueError(
                f"images must have the same shape, got {shapes[0]} and {shapes[-1]}: set `size` "
                "for Pillow images, or resize the tensors in the data set"
            )
        labels = torch.tensor([int(label) for _, label in items], dtype=torch.long)
        return torch.stack(images), labels

    def _image(self, image: Any) -> Tensor:
        if isinstance(image, Tensor):
            pixels = image[None] if image.dim() == 2 else image
        elif hasattr(image, "convert"):
            pixels = image_to_tensor(
                self.framing.apply(image.convert("L" if self.is_gray else "RGB"))
            )
        else:
            raise TypeError(
                f"an image must be a tensor or a Pillow image, got {type(image).__name__}: convert "
                "it in the data set"
            )
        return as_pixels(pixels).float()

    @property
    def labels(self) -> Tensor | None:
        """Labels of all items; None if the data set cannot provide them without reading images.

        They come from the attribute `targets`, or from the second tensor of a `TensorDataset`.
        """
        return _targets(self.dataset)


def from_dataset(
    train: Dataset[Any],
    *,
    test: Dataset[Any] | None = None,
    validation: Dataset[Any] | None = None,
    class_names: Sequence[str] | None = None,
    size: int | Sequence[int] | None = None,
    name: str = "given in Python",
) -> DataSet:
    """Make a data set of map-style `Dataset` objects with items (image, label).

    An image is a Pillow image, or a tensor of shape (C, H, W) or (H, W) with bytes or with
    floating-point numbers in [0, 1].

    Args:
        train: Items to train on.
        test: Items to test on. By default a fifth of the items of `train` is held out, the same
            ones in every run.
        validation: Items to choose settings on.
        class_names: Names of the classes. By default `train.classes`, or the numbers from 0 to the
            largest of `train.targets`.
        size: Size that Pillow images are scaled and cropped to: a side, or height and width.
        name: Name of the data set.

    Returns:
        The data set, for `eq.train(..., data=...)`.

    Raises:
        ValueError: If images have values outside [0, 1], or the classes are not known.

    Examples:
        >>> items = [(torch.rand(1, 8, 8), k % 2) for k in range(8)]
        >>> eq.data.from_dataset(items, class_names=["even", "odd"]).class_names
        ('even', 'odd')
    """
    framing = Framing.make(size)
    first = train[0][0]
    is_gray = getattr(first, "mode", "") in ("1", "L", "LA", "I", "F")

    def source(part: Dataset[Any]) -> Source:
        if isinstance(part, TensorDataset) and len(part.tensors) == 2:
            return Split(*part.tensors)
        return Items(part, framing, is_gray)

    parts = {"train": source(train)}
    if validation is not None:
        parts["validation"] = source(validation)
    if test is not None:
        parts["test"] = source(test)
    else:
        parts["train"], parts["test"] = stratified_split(
            parts["train"], TEST_SHARE, TEST_SEED, least=1
        )
    data = DataSet(
        name=name,
        class_names=_class_names(train, class_names),
        framing=framing,
        **parts,  # type: ignore[arg-type]
    )
    pixels = data.train.fetch(torch.zeros(1, dtype=torch.long))[0]
    low, high = float(pixels.min()), float(pixels.max())
    if pixels.dim() != 4 or not 0 <= low <= high <= 1:
        raise ValueError(
            "images must have shape (C, H, W) and values in [0, 1], got shape "
            f"{tuple(pixels.shape[1:])} and values from {low:g} to {high:g}: leave normalization "
            "to the recipe (data.normalize)"
        )
    return data


def _class_names(train: Any, given: Sequence[str] | None) -> tuple[str, ...]:
    names = given if given is not None else getattr(_behind_subsets(train), "classes", None)
    if names is not None:
        return tuple(map(str, names))
    labels = _targets(train)
    if labels is None:
        raise ValueError("the data set has neither `classes` nor `targets`: pass class_names")
    return tuple(map(str, range(int(labels.max()) + 1)))


def _behind_subsets(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _targets(dataset: Any) -> Tensor | None:
    if isinstance(dataset, Subset):
        labels = _targets(dataset.dataset)
        return None if labels is None else labels[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[1]
    targets = getattr(dataset, "targets", None)
    if targets is None or len(targets) != len(dataset):
        return None
    return torch.as_tensor(targets, dtype=torch.long)
