"""Image files in folders, told by their names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".ppm", ".pgm", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
)


def is_image(path: Path | str) -> bool:
    """Whether a file's name ends as that of an image does."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


def list_images(folder: Path) -> list[Path]:
    """The images of a folder, by name."""
    return [folder / name for name in sorted(filter(is_image, os.listdir(folder)))]


def list_folders(folder: Path) -> list[Path]:
    """The folders in a folder, by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir())


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Image files, those of folders included, in order.

    Examples:
        >>> from pathlib import Path
        >>> Path("found").mkdir()
        >>> eq.data.image_from_tensor(torch.rand(3, 4, 4)).save("found/a.png")
        >>> [path.name for path in eq.data.find_images([Path("found")])]
        ['a.png']
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(below for below in path.rglob("*") if is_image(below))
            if not inside:
                raise ValueError(f"there is no image in the folder {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"there is no file or folder {path}")
    return found
