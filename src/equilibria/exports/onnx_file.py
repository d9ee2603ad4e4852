"""Export to ONNX, with a `Loop` operator per equilibrium layer."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.exports.graph import ExportError, ModelGraph
from equilibria.exports.torch_program import exported_program

METADATA = "equilibria"
"""Key of the metadata in an ONNX file."""
OUTPUTS = ("logits", "residual", "iterations")


def write(
    graph: ModelGraph, probe: Tensor, path: Path, metadata: Mapping[str, Any], any_size: bool
) -> None:
    """Write a graph as an ONNX file.

    Args:
        graph: Model to write.
        probe: Example images, shape (2, C, H, W).
        path: File to write.
        metadata: Metadata to store in the file.
        any_size: Whether the graph accepts images of any size.
    """
    _require("onnx", "onnxscript")
    from onnxscript import opset18 as op

    # The smooth signs of MOptEqs use hypot, which PyTorch's exporter does not support.
    def hypot(a: Any, b: Any) -> Any:
        return op.Sqrt(op.Add(op.Mul(a, a), op.Mul(b, b)))

    program = exported_program(graph, probe, any_size=any_size)
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=list(OUTPUTS),
            custom_translation_table={torch.ops.prims.hypot.default: hypot},
        )
        assert exported is not None
        exported.model.metadata_props[METADATA] = json.dumps(metadata)
        exported.save(path)


def runner(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]] | None:
    """Return a function that runs the file with ONNX Runtime, or None if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, ...]:
        outputs = session.run(list(OUTPUTS), {"images": images.numpy()})
        return tuple(map(torch.as_tensor, outputs))

    return run


def read_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a file."""
    import onnx

    properties = onnx.load(path, load_external_data=False).metadata_props
    entries = {entry.key: entry.value for entry in properties}
    metadata: dict[str, Any] = json.loads(entries[METADATA])
    return metadata


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"the format onnx needs {' and '.join(missing)}; run pip install 'equilibria[export]'"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's progress output and its internal deprecation warnings."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
