"""Trained models as files for other programs: one file a format."""

from equilibria.exports.api import Exported, Format, export
from equilibria.exports.constants import certificate_constants
from equilibria.exports.graph import ExportError, Loop, model_graph

__all__ = [
    "ExportError",
    "Exported",
    "Format",
    "Loop",
    "certificate_constants",
    "export",
    "model_graph",
]
