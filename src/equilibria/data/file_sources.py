"""Images that stay on disk until a batch asks for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from equilibria.data.image_files import as_pixels, read_image, read_label_map
from equilibria.data.readers import DataFileError
from equilibria.images import Framing

Content = TypeVar("Content")

READING_THREADS = 4


@dataclass(frozen=True)
class ImageFiles:
    """Image files with one class per file.

    `threads` threads decode them, or one thread in a worker process.

    Examples:
        >>> eq.data.image_from_tensor(torch.full((1, 6, 8), 0.5)).save("gray.png")
        >>> framing = eq.data.Framing(size=(4, 4))
        >>> files = eq.data.ImageFiles(("gray.png",), torch.tensor([0]), framing)
        >>> files.fetch(torch.tensor([0]))[0].shape
        torch.Size([1, 3, 4, 4])
    """

    paths: tuple[Path | str, ...]
    """Strings where there are millions: a `Path` takes several times the memory."""
    labels: Tensor
    framing: Framing
    is_gray: bool = False
    threads: int = READING_THREADS
    skips_unreadable: bool = False
    """Whether batches leave out files that cannot be read; otherwise they are an error."""
    unreadable: dict[str, DataFileError] = field(default_factory=dict, compare=False, repr=False)
    """Errors of the files that were left out so far, by path."""

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.labels):
            raise ValueError(
                f"{len(self.paths)} images but {len(self.labels)} labels: give one label an image"
            )

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height, width; None if an image must be read to know."""
        return (1 if self.is_gray else 3, *self.framing.size) if self.framing.size else None

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, pixels in [0, 1], and their labels by index."""
        images, labels = self.read(indices)
        return as_pixels(images), labels

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read samples like `fetch`, with images as bytes."""
        _, images, labels, problems = self.read_readable(indices)
        for problem in problems:
            raise problem
        return images, labels

    def read_readable(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, list[DataFileError]]:
        """Return the places of readable samples, their bytes and labels, and all errors."""

        def read(path: Path) -> Tensor | DataFileError:
            try:
                return read_image(path, self.framing, is_gray=self.is_gray)
            except DataFileError as error:
                return error

        paths = [Path(self.paths[index]) for index in indices.tolist()]
        found = _in_threads(read, paths, self.threads)
        problems = [content for content in found if isinstance(content, DataFileError)]
        images = {
            place: content for place, content in enumerate(found) if isinstance(content, Tensor)
        }
        kept = torch.tensor(list(images), dtype=torch.long)
        empty = torch.zeros(0, *(self.image_shape or (0, 0, 0)), dtype=torch.uint8)
        stacked = _stacked([paths[i] for i in images], list(images.values()), empty)
        return kept, stacked, self.labels[indices[kept]], problems


@dataclass(frozen=True)
class SegmentedFiles:
    """Image files with one file per image that holds a label per pixel.

    `classes[value]` is the class of a pixel whose value in the map's file is `value`.

    Examples:
        >>> from pathlib import Path
        >>> picture, labels = (Path(name) for name in ("picture.png", "labels.png"))
        >>> for path in (picture, labels):
        ...     eq.data.image_from_tensor(torch.zeros(1, 8, 8)).save(path)
        >>> framing, classes = eq.data.Framing(), torch.arange(256)
        >>> files = eq.data.SegmentedFiles((picture,), (labels,), framing, classes)
        >>> [part.shape for part in files.fetch(torch.tensor([0]))]
        [torch.Size([1, 3, 8, 8]), torch.Size([1, 8, 8])]
    """

    paths: tuple[Path, ...]
    maps: tuple[Path, ...]
    framing: Framing
    classes: Tensor
    threads: int = READING_THREADS
    is_gray: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, pixels in [0, 1], and their label maps by index."""
        images, labels = self.read(indices)
        return as_pixels(images), labels

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read samples like `fetch`, with images as bytes."""
        none = torch.zeros(len(self))
        files = ImageFiles(self.paths, none, self.framing, self.is_gray, self.threads)
        images, _ = files.read(indices)
        maps = [self.maps[index] for index in indices.tolist()]
        read = partial(read_label_map, framing=self.framing)
        values = _stacked(maps, _in_threads(read, maps, self.threads), images[:0])[:, 0]
        if values.shape[1:] != images.shape[2:]:
            raise DataFileError(
                maps[0],
                f"a map of {tuple(values.shape[1:])} for an image of {tuple(images.shape[2:])}",
                "give `size` to scale both alike, or replace the pair",
            )
        return images, self.classes[values.long()]


def _in_threads(read: Callable[[Path], Content], paths: list[Path], threads: int) -> list[Content]:
    """Apply `read` to each file. A worker process, one of several, uses no threads."""
    if get_worker_info() is not None or min(threads, len(paths)) < 2:
        return list(map(read, paths))
    with ThreadPoolExecutor(min(threads, len(paths))) as readers:
        return list(readers.map(read, paths))


def _stacked(paths: list[Path], images: list[Tensor], empty: Tensor) -> Tensor:
    """Stack the images of these files; `empty` if there are none."""
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            raise DataFileError(
                path,
                f"of shape {tuple(image.shape)}, but {paths[0]} of {tuple(images[0].shape)}",
                "give `size`, so that all images are scaled to one",
            )
    return torch.stack(images) if images else empty
