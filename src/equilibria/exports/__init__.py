"""Export of trained models to ONNX, torch.export and safetensors files."""

from equilibria.exports.api import Exported, export
from equilibria.exports.graph import ExportError

__all__ = [
    "ExportError",
    "Exported",
    "export",
]
