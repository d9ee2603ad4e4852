"""What goes wrong with files."""

from __future__ import annotations

from pathlib import Path


class MissingDataError(FileNotFoundError):
    """A data set is not where it was looked for."""


class DataFileError(ValueError):
    """A file of a data set is not what it should be."""

    def __init__(self, path: Path | str, what: str, remedy: str = "") -> None:
        self.path = Path(path)
        remedy = remedy or "replace it by a fresh copy of the original"
        super().__init__(f"{path}: {what}; {remedy}")


class DownloadError(OSError):
    """A download did not arrive."""
