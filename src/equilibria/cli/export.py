"""`equilibria export`: a trained model as a file that other programs run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import equilibria as eq
from equilibria.cli.app import (
    Best,
    DataRoot,
    JsonObject,
    OverwriteFiles,
    SomeRun,
    command,
    opened,
)
from equilibria.cli.console import print_facts, print_json, shown
from equilibria.cli.faults import complain, writable_file

if TYPE_CHECKING:
    import torch

COMPARED = 64
"""Test images that a file is compared on."""


@command(
    "export",
    "equilibria export runs/opteq --format onnx",
    "equilibria export runs/opteq --format torch-export --output opteq.pt2",
    "equilibria export runs/opteq --format onnx --unrolled 20",
    "equilibria export runs/opteq --format safetensors",
)
def export(
    run: SomeRun,
    format_: Annotated[
        str, Option("--format", help="onnx, torch-export or safetensors (weights and recipe).")
    ] = "onnx",
    output: Annotated[
        Path | None,
        Option(help="File; named after the run if not set.", callback=writable_file),
    ] = None,
    tolerance: Annotated[
        float, Option(help="Relative residual at which a sample stops in the graph.")
    ] = 3e-6,
    max_iterations: Annotated[int, Option(min=1, help="Of the loop.")] = 200,
    unrolled: Annotated[
        int | None, Option(min=1, help="Evaluations of the map in the place of a loop.")
    ] = None,
    any_size: Annotated[
        bool, Option("--any-size", help="Images of any size, where the weights permit.")
    ] = False,
    overwrite: OverwriteFiles = False,
    best: Best = False,
    root: DataRoot = None,
    as_json: JsonObject = False,
) -> None:
    """Write a trained model as one file: an ONNX graph, a PyTorch program, or its weights.

    The equilibrium is a loop with a stopping rule for each sample. The file is run, and compared
    with the model on test images (on random pixels where the data set is not there).
    """
    images = None if format_ == "safetensors" else _test_images(run, best, root)
    found = eq.export(
        run,
        output,
        format=format_,  # type: ignore[arg-type]
        tolerance=tolerance,
        max_iterations=max_iterations,
        unrolled=unrolled,
        any_size=any_size,
        images=images,
        weights="best" if best else "last",
        overwrite=overwrite,
    )
    if as_json:
        print_json({**vars(found), "path": str(found.path)})
    else:
        print_facts(f"{found.path}", _rows(found, "random" if images is None else "test"))
    complain(_mismatch(found))


def _test_images(run: Path, best: bool, root: Path | None) -> torch.Tensor | None:
    try:
        return opened(run, eq.training.processes.choose_device("cpu"), best, root).some_test_images(
            COMPARED
        )[0]
    except eq.data.MissingDataError:
        return None


def _rows(found: eq.exports.Exported, what: str) -> list[tuple[str, str]]:
    compared = f" of {found.samples} {what} images"
    limits = found.metadata.get("certificate", {}).get("contraction", [])
    known = [f"{q:.3f}" for q in limits if q is not None]
    rows: list[tuple[str, Any]] = [
        ("Format", found.format),
        ("Size", f"{found.bytes / 1024:.0f} KiB"),
        ("Contraction, proven", ", ".join(known) if len(known) == len(limits) else "none"),
        ("Same class", shown(found.same_classes, "", compared)),
        ("Largest difference of a logit", shown(found.difference, ".1e")),
        ("Converged in the graph", shown(found.converged, "", compared)),
        ("Iterations, mean", shown(found.iterations, ".1f")),
    ]
    return rows


def _mismatch(found: eq.exports.Exported) -> str:
    """What is wrong with a file that does not compute what the model does; empty if all is well."""
    if found.difference is None or "unrolled" in found.metadata["iteration"]:
        return ""
    if found.converged is not None and found.converged < found.samples:
        return (
            f"{found.samples - found.converged} of {found.samples} images did not converge in the "
            "graph: raise --max-iterations, or bound the norms in training (norm: bound)"
        )
    if found.same_classes != found.samples:
        return "the file names other classes than the model: lower --tolerance"
    return ""
