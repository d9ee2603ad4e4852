"""ONNX: a `Loop` with its stopping rule, for ONNX Runtime and others."""

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
"""The key of the metadata in the file."""
OUTPUTS = ("logits", "residual", "iterations")


def write(
    graph: ModelGraph, probe: Tensor, path: Path, facts: Mapping[str, Any], any_size: bool
) -> None:
    """Write the graph of a model as an ONNX file with its metadata."""
    _require("onnx", "onnxscript")
    from onnxscript import opset18 as op

    def hypot(a: Any, b: Any) -> Any:
        """√(a² + b²), of MOptEqs' smooth signs, which torch's exporter does not know."""
        return op.Sqrt(op.Add(op.Mul(a, a), op.Mul(b, b)))

    program = exported_program(graph, probe, any_size=any_size)
    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=list(OUTPUTS),
            custom_translation_table={torch.ops.prims.hypot.default: hypot},
        )
        assert made is not None
        made.model.metadata_props[METADATA] = json.dumps(facts)
        made.save(path)


def runner(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]] | None:
    """What ONNX Runtime makes of the file; None where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, ...]:
        found = session.run(list(OUTPUTS), {"images": images.numpy()})
        return tuple(map(torch.as_tensor, found))

    return run


def read_facts(path: Path) -> dict[str, Any]:
    """The metadata of a file."""
    import onnx

    held = onnx.load(path, load_external_data=False).metadata_props
    found: dict[str, Any] = json.loads({entry.key: entry.value for entry in held}[METADATA])
    return found


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ExportError(
            f"the format onnx needs {' and '.join(missing)}: pip install 'equilibria[export]'"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its progress, and warns of what it deprecates in itself."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
