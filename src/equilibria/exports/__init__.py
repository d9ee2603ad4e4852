"""Trained models as files for other programs: one file a format."""

from equilibria.exports.api import Exported, Format, export
from equilibria.exports.graph import ExportError, Loop, model_graph

__all__ = [
    "ExportError",
    "Exported",
    "Format",
    "Loop",
    "export",
    "model_graph",
]
