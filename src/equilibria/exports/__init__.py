"""Trained models as files for other programs: one file a format."""

from equilibria.exports.api import Exported, export
from equilibria.exports.graph import ExportError

__all__ = [
    "ExportError",
    "Exported",
    "export",
]
