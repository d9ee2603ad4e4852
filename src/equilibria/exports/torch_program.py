"""Export to a `torch.export` program, which PyTorch loads without this package."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.exports.graph import ModelGraph

METADATA = "equilibria.json"
"""File inside the program that stores the metadata."""


def exported_program(graph: ModelGraph, probe: Tensor, *, any_size: bool) -> Any:
    """Return the graph as an exported program for any number of images.

    Args:
        graph: Model to export.
        probe: Example images, shape (2, C, H, W).
        any_size: Whether the program accepts images of any size.
    """
    dimensions: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if any_size:
        dimensions |= {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    with warnings.catch_warnings(), torch.no_grad():
        # PyTorch warns about its internal deprecations and about unchanged buffers.
        warnings.simplefilter("ignore")
        return torch.export.export(
            graph, (probe,), dynamic_shapes={"images": dimensions}, strict=False
        )


def write(
    graph: ModelGraph, probe: Tensor, path: Path, metadata: Mapping[str, Any], any_size: bool
) -> None:
    """Write a graph as a `torch.export` program; see `onnx_file.write` for the arguments."""
    program = exported_program(graph, probe, any_size=any_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata)})


def runner(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a function that runs the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.export.load(path).module()
    return loaded


def read_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a file."""
    extra_files = {METADATA: ""}
    torch.export.load(path, extra_files=extra_files)
    metadata: dict[str, Any] = json.loads(extra_files[METADATA])
    return metadata
