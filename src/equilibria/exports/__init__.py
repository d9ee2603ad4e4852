"""Export of trained models to ONNX, torch.export and safetensors files."""

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
