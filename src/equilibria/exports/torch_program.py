"""torch.export: a program with `while_loop`, which `torch.export.load` reads without our code."""

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
"""The file inside the program that holds its metadata."""


def exported_program(graph: ModelGraph, probe: Tensor, *, any_size: bool) -> Any:
    """The graph for any number of images."""
    dimensions: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if any_size:
        dimensions |= {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    with warnings.catch_warnings(), torch.no_grad():
        # Of torch's own making: what it deprecates inside itself, and buffers that do not change.
        warnings.simplefilter("ignore")
        # What it has compiled of an earlier loop would fix the sizes of this one.
        torch.compiler.reset()
        return torch.export.export(
            graph, (probe,), dynamic_shapes={"images": dimensions}, strict=False
        )


def write(
    graph: ModelGraph, probe: Tensor, path: Path, facts: Mapping[str, Any], any_size: bool
) -> None:
    """Write the exported program of a model with its metadata."""
    program = exported_program(graph, probe, any_size=any_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path, extra_files={METADATA: json.dumps(facts)})


def runner(path: Path) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What the file computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.export.load(path).module()
    return loaded


def read_facts(path: Path) -> dict[str, Any]:
    """The metadata of a file."""
    held = {METADATA: ""}
    torch.export.load(path, extra_files=held)
    found: dict[str, Any] = json.loads(held[METADATA])
    return found
