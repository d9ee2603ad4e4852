"""Search for image files by their suffixes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".ppm", ".pgm", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
)


def is_image(path: Path | str) -> bool:
    """Whether a file name has the suffix of an image format."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def list_images(folder: Path) -> list[Path]:
    """Return the image files in a folder, sorted by name."""
    return [folder / name for name in sorted(filter(is_image, os.listdir(folder)))]


def list_folders(folder: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir())


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Return image files, including those in folders at any depth.

    Args:
        paths: Files and folders. A file counts as an image whatever its suffix.

    Returns:
        The files in the order of `paths`, those of a folder sorted.

    Raises:
        ValueError: If a path does not exist, or a folder holds no image.

    Examples:
        >>> from pathlib import Path
        >>> Path("photos").mkdir()
        >>> eq.data.image_from_tensor(torch.rand(3, 4, 4)).save("photos/a.png")
        >>> [path.name for path in eq.data.find_images([Path("photos")])]
        ['a.png']
    """
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(below for below in path.rglob("*") if is_image(below))
            if not inside:
                raise ValueError(f"there is no image in the folder {path}")
            images += inside
        elif path.is_file():
            images.append(path)
        else:
            raise ValueError(f"there is no file or folder {path}")
    return images
