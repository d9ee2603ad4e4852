"""Any map-style `Dataset` of torch, and what it takes to make a data set of it."""

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
    """The items (image, label) of a map-style `Dataset`.

    An image is one of Pillow's, which is framed, or a tensor `(C, H, W)` or `(H, W)` of bytes or of
    numbers in [0, 1].

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
    """Whether Pillow's images are read as gray ones."""

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, pixels in [0, 1], and their labels by index."""
        items = [self.dataset[index] for index in indices.tolist()]
        images = [self._image(image) for image, _ in items]
        if any(image.shape != images[0].shape for image in images):
            shapes = sorted({tuple(image.shape) for image in images})
            raise ValueError(
                f"images of different shapes, {shapes[0]} and {shapes[-1]}: give `size` for those "
                "of Pillow, or bring tensors to one size"
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
                f"an image is a tensor or one of Pillow's, not {type(image).__name__}: convert it "
                "in the data set"
            )
        return as_pixels(pixels).float()

    @property
    def labels(self) -> Tensor | None:
        """The labels, where the data set knows them without its images (`targets`)."""
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
    """A data set of map-style `Dataset`s with items (image, label), for `eq.train(…, data=…)`.

    test: without it, a fifth of the items of `train` is to test on, always the same ones.
    class_names: without them, `train.classes`, or the numbers up to the largest of its `targets`.
    size: that Pillow's images are brought to; tensors have theirs.

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
        held = stratified_split(parts["train"], TEST_SHARE, TEST_SEED, least=1)
        parts["train"], parts["test"] = held
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
            "an image is (channels, height, width) with values in [0, 1], not "
            f"{tuple(pixels.shape[1:])} with {low:g} to {high:g}: leave normalization to the "
            "recipe (data.normalize)"
        )
    return data


def _class_names(train: Any, given: Sequence[str] | None) -> tuple[str, ...]:
    names = given if given is not None else getattr(_behind_subsets(train), "classes", None)
    if names is not None:
        return tuple(map(str, names))
    labels = _targets(train)
    if labels is None:
        raise ValueError("the data set does not say its classes: give class_names")
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
