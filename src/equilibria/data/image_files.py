"""Images that stay on disk until they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equilibria.data.errors import DataFileError

if TYPE_CHECKING:
    from PIL.Image import Image

BRIGHTEST = 255.0
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".tif", ".tiff", ".webp"})
READING_THREADS = 4


@dataclass(frozen=True)
class Framing:
    """How an image of any size becomes one of `size` (height, width).

    It is scaled, its proportions kept, until it covers `cover` (`size` if None), and the center is
    cut out. Without `size` images stay as they are on disk.
    """

    size: tuple[int, int] | None = None
    cover: tuple[int, int] | None = None

    @classmethod
    def make(cls, size: int | Sequence[int] | None, resize: int | None = None) -> Framing:
        """Of `size` (a side, or height and width), after the shorter side was scaled to `resize`.

        With 256 and 224 for `resize` and `size`, the usual way to test on ImageNet.
        """
        if size is None:
            if resize is not None:
                raise ValueError("resize needs a size to cut out: give both, or neither")
            return cls()
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        if min(height, width) < 1:
            raise ValueError(f"an image has at least one pixel, not {height}×{width}")
        if resize is None:
            return cls((height, width))
        if resize < max(height, width):
            raise ValueError(
                f"the shorter side, scaled to {resize}, does not hold {height}×{width}: "
                f"set resize to at least {max(height, width)}"
            )
        return cls((height, width), (resize, resize))

    def apply(self, image: Image, *, is_map: bool = False) -> Image:
        """The image framed; a map of labels is scaled without mixing them."""
        from PIL.Image import Resampling

        if self.size is None:
            return image
        height, width = self.size
        cover_height, cover_width = self.cover or self.size
        scale = max(cover_width / image.width, cover_height / image.height)
        # Rounding must not leave the image a pixel short of what is cut out.
        scaled = (
            max(cover_width, round(image.width * scale)),
            max(cover_height, round(image.height * scale)),
        )
        if scaled != image.size:
            image = image.resize(scaled, Resampling.NEAREST if is_map else Resampling.BILINEAR)
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True)
class ImageFiles:
    """One file an image, with its class; decoded by `threads` threads."""

    paths: tuple[Path | str, ...]
    """As text where there are millions: a `Path` takes several times the memory."""
    labels: Tensor
    framing: Framing
    is_gray: bool = False
    threads: int = READING_THREADS

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.labels):
            raise ValueError(
                f"{len(self.paths)} images but {len(self.labels)} labels: give one label an image"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        chosen = [Path(self.paths[index]) for index in indices.tolist()]
        return self._read(chosen), self.labels[indices]

    def _read(self, paths: list[Path]) -> Tensor:
        def read(path: Path) -> Tensor:
            return read_image(path, self.framing, is_gray=self.is_gray)

        if not paths:
            height, width = self.framing.size or (0, 0)
            return torch.zeros(0, 1 if self.is_gray else 3, height, width)
        return _stack(paths, _in_threads(read, paths, self.threads)).float().div_(BRIGHTEST)


@dataclass(frozen=True)
class SegmentedFiles:
    """Images with a map of labels each, both files.

    `classes[value]` is the class of a pixel whose value in the map's file is `value`.
    """

    paths: tuple[Path, ...]
    maps: tuple[Path, ...]
    framing: Framing
    classes: Tensor
    threads: int = READING_THREADS

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        chosen = indices.tolist()
        paths = [self.paths[index] for index in chosen]
        images = ImageFiles(
            tuple(paths), torch.zeros(len(paths)), self.framing, threads=self.threads
        ).fetch(torch.arange(len(paths)))[0]
        if not chosen:
            return images, torch.zeros(0, *images.shape[2:], dtype=torch.long)
        maps = [self.maps[index] for index in chosen]
        values = _stack(maps, _in_threads(self._read_map, maps, self.threads))
        if values.shape[1:] != images.shape[2:]:
            raise DataFileError(
                maps[0],
                f"a map of {tuple(values.shape[1:])} for an image of {tuple(images.shape[2:])}",
                "give `size` to scale both alike, or replace the pair",
            )
        return images, self.classes[values.long()]

    def _read_map(self, path: Path) -> Tensor:
        image = _open(path)
        if image.mode not in ("L", "P"):
            raise DataFileError(
                path, f"not a map of labels: its pixels are {image.mode}, not one byte each"
            )
        framed = self.framing.apply(image, is_map=True)
        return torch.from_numpy(np.array(framed, dtype=np.uint8))


def read_image(path: Path, framing: Framing, *, is_gray: bool = False) -> Tensor:
    """One image as bytes, shape `(channels, height, width)`."""
    image = framing.apply(_open(path).convert("L" if is_gray else "RGB"))
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels[None] if is_gray else pixels.permute(2, 0, 1)


def list_images(folder: Path) -> list[Path]:
    """The images of a folder, by name."""
    return [folder / name for name in image_names(folder)]


def image_names(folder: Path) -> list[str]:
    """The names of the images of a folder, in order."""
    names = os.listdir(folder)
    return sorted(name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES)


def _open(path: Path) -> Image:
    import PIL.Image

    try:
        image = PIL.Image.open(path)
        with image:
            image.load()
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise DataFileError(path, f"cannot be read as an image ({error})") from error
    return image


def _in_threads(read: Callable[[Path], Tensor], paths: list[Path], threads: int) -> list[Tensor]:
    if threads < 2 or len(paths) < 2:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(min(threads, len(paths))) as readers:
        return list(readers.map(read, paths))


def _stack(paths: list[Path], images: list[Tensor]) -> Tensor:
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            raise DataFileError(
                path,
                f"of shape {tuple(image.shape)}, but {paths[0]} of {tuple(images[0].shape)}",
                "give `size`, so that all images are scaled to one",
            )
    return torch.stack(images)
