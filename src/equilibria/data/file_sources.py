"""Sources of image files, which are read when a batch needs them."""

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

    Attributes:
        paths: Image files. Use strings for millions of files: a `Path` takes several times the
            memory.
        labels: Class of each file, shape (samples,).
        framing: Size that images are scaled and cropped to.
        is_gray: Whether images have one channel instead of three.
        threads: Number of threads that decode images; a worker process uses one.
        skips_unreadable: Whether batches skip files that cannot be read, instead of raising.
        unreadable: Errors of the files that were skipped so far, by path.

    Examples:
        >>> eq.data.image_from_tensor(torch.full((1, 6, 8), 0.5)).save("gray.png")
        >>> framing = eq.data.Framing(size=(4, 4))
        >>> files = eq.data.ImageFiles(("gray.png",), torch.tensor([0]), framing)
        >>> files.fetch(torch.tensor([0]))[0].shape
        torch.Size([1, 3, 4, 4])
    """

    paths: tuple[Path | str, ...]
    labels: Tensor
    framing: Framing
    is_gray: bool = False
    threads: int = READING_THREADS
    skips_unreadable: bool = False
    unreadable: dict[str, DataFileError] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.labels):
            raise ValueError(
                f"{len(self.paths)} images but {len(self.labels)} labels: give one label per image"
            )

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width; None if they depend on the file."""
        return (1 if self.is_gray else 3, *self.framing.size) if self.framing.size else None

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, pixels in [0, 1], and their labels.

        Args:
            indices: Indices of the samples, shape (B,).

        Raises:
            DataFileError: If an image cannot be read.
        """
        images, labels = self.read(indices)
        return as_pixels(images), labels

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read samples like `fetch`, with images as bytes.

        Args:
            indices: Indices of the samples, shape (B,).
        """
        _, images, labels, problems = self.read_readable(indices)
        for problem in problems:
            raise problem
        return images, labels

    def read_readable(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, list[DataFileError]]:
        """Read samples and report those that cannot be read.

        Args:
            indices: Indices of the samples, shape (B,).

        Returns:
            The positions in `indices` of the samples that were read, their images as bytes, their
            labels, and the errors of the others.
        """

        def read(path: Path) -> Tensor | DataFileError:
            try:
                return read_image(path, self.framing, is_gray=self.is_gray)
            except DataFileError as error:
                return error

        paths = [Path(self.paths[index]) for index in indices.tolist()]
        results = _in_threads(read, paths, self.threads)
        problems = [result for result in results if isinstance(result, DataFileError)]
        images = {i: result for i, result in enumerate(results) if isinstance(result, Tensor)}
        kept = torch.tensor(list(images), dtype=torch.long)
        empty = torch.zeros(0, *(self.image_shape or (0, 0, 0)), dtype=torch.uint8)
        stacked = _stacked([paths[i] for i in images], list(images.values()), empty)
        return kept, stacked, self.labels[indices[kept]], problems


@dataclass(frozen=True)
class SegmentedFiles:
    """Image files, each with a file that holds one label per pixel.

    Attributes:
        paths: Image files.
        maps: Label map of each image, an image file with one byte per pixel.
        framing: Size that images and maps are scaled and cropped to.
        classes: `classes[value]` is the class of pixels with this value in a map, shape (256,).
        threads: Number of threads that decode images; a worker process uses one.
        is_gray: Whether images have one channel instead of three.

    Examples:
        >>> from pathlib import Path
        >>> image, labels = (Path(name) for name in ("image.png", "labels.png"))
        >>> for path in (image, labels):
        ...     eq.data.image_from_tensor(torch.zeros(1, 8, 8)).save(path)
        >>> framing, classes = eq.data.Framing(), torch.arange(256)
        >>> files = eq.data.SegmentedFiles((image,), (labels,), framing, classes)
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
        """Return images, pixels in [0, 1], and their label maps.

        Args:
            indices: Indices of the samples, shape (B,).

        Raises:
            DataFileError: If an image or map cannot be read, or their sizes differ.
        """
        images, labels = self.read(indices)
        return as_pixels(images), labels

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Read samples like `fetch`, with images as bytes.

        Args:
            indices: Indices of the samples, shape (B,).
        """
        no_labels = torch.zeros(len(self))
        files = ImageFiles(self.paths, no_labels, self.framing, self.is_gray, self.threads)
        images, _ = files.read(indices)
        maps = [self.maps[index] for index in indices.tolist()]
        read = partial(read_label_map, framing=self.framing)
        values = _stacked(maps, _in_threads(read, maps, self.threads), images[:0])[:, 0]
        if values.shape[1:] != images.shape[2:]:
            raise DataFileError(
                maps[0],
                f"the label map has size {tuple(values.shape[1:])}, but the image has "
                f"{tuple(images.shape[2:])}",
                "set `size` to scale both to the same size, or replace the pair",
            )
        return images, self.classes[values.long()]


def _in_threads(read: Callable[[Path], Content], paths: list[Path], threads: int) -> list[Content]:
    """Apply `read` to each file, in threads unless this is a worker process."""
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
                f"has shape {tuple(image.shape)}, but {paths[0]} has {tuple(images[0].shape)}",
                "set `size`, so that all images are scaled to the same size",
            )
    return torch.stack(images) if images else empty
