"""`equilibria export`: write a trained model to a file for other programs."""

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
"""Number of test images on which the file is compared with the model."""


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
        str,
        Option("--format", help="Format: onnx, torch-export or safetensors (weights and recipe)."),
    ] = "onnx",
    output: Annotated[
        Path | None,
        Option(help="Output file (default: named after the run).", callback=writable_file),
    ] = None,
    tolerance: Annotated[
        float, Option(help="Relative residual at which a sample has converged in the graph.")
    ] = 3e-6,
    max_iterations: Annotated[
        int, Option(min=1, help="Largest number of iterations of the loop.")
    ] = 200,
    unrolled: Annotated[
        int | None, Option(min=1, help="Fixed number of evaluations of the map, instead of a loop.")
    ] = None,
    any_size: Annotated[
        bool, Option("--any-size", help="Accept images of any size, if the weights permit it.")
    ] = False,
    overwrite: OverwriteFiles = False,
    best: Best = False,
    root: DataRoot = None,
    as_json: JsonObject = False,
) -> None:
    """Write a trained model as one file: an ONNX graph, a PyTorch program, or its weights.

    The equilibrium is a loop that stops each sample when it has converged. The file is compared
    with the model on test images, or on random pixels if the data set is missing.
    """
    images = None if format_ == "safetensors" else _test_images(run, best, root)
    exported = eq.export(
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
        print_json({**vars(exported), "path": str(exported.path)})
    else:
        print_facts(f"{exported.path}", _rows(exported, "random" if images is None else "test"))
    complain(_mismatch(exported))


def _test_images(run: Path, best: bool, root: Path | None) -> torch.Tensor | None:
    try:
        return opened(run, eq.training.processes.choose_device("cpu"), best, root).some_test_images(
            COMPARED
        )[0]
    except eq.data.MissingDataError:
        return None


def _rows(exported: eq.exports.Exported, kind: str) -> list[tuple[str, str]]:
    compared = f" of {exported.samples} {kind} images"
    factors = exported.metadata.get("certificate", {}).get("contraction", [])
    known = [f"{q:.3f}" for q in factors if q is not None]
    rows: list[tuple[str, Any]] = [
        ("Format", exported.format),
        ("Size", f"{exported.bytes / 1024:.0f} KiB"),
        ("Contraction, guaranteed", ", ".join(known) if len(known) == len(factors) else "none"),
        ("Same class", shown(exported.same_classes, "", compared)),
        ("Largest difference of a logit", shown(exported.difference, ".1e")),
        ("Converged in the graph", shown(exported.converged, "", compared)),
        ("Iterations, mean", shown(exported.iterations, ".1f")),
    ]
    return rows


def _mismatch(exported: eq.exports.Exported) -> str:
    """Describe the difference between file and model; empty if they agree."""
    if exported.difference is None or "unrolled" in exported.metadata["iteration"]:
        return ""
    if exported.converged is not None and exported.converged < exported.samples:
        return (
            f"{exported.samples - exported.converged} of {exported.samples} images did not "
            "converge in the graph; raise --max-iterations, or bound the norms in training "
            "(norm: bound)"
        )
    if exported.same_classes != exported.samples:
        return "the file and the model predict different classes; lower --tolerance"
    return ""
