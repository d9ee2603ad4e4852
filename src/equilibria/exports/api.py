"""`export`: a trained model as a file that other programs run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from equilibria.certificates.constants import certificate_constants
from equilibria.equilibrium import solving
from equilibria.exports import onnx_file, torch_program
from equilibria.exports.graph import Loop, model_graph
from equilibria.images import images_of
from equilibria.registry import check_choice
from equilibria.training import pack
from equilibria.training.experiment import RecipeModel, trained_model
from equilibria.training.packed import kept_latents

Format = Literal["onnx", "torch-export", "safetensors"]
ENDINGS: Mapping[str, str] = {"onnx": "onnx", "torch-export": "pt2", "safetensors": "safetensors"}
CHECK_TOLERANCE = 1e-6
"""Of the solves that a file is compared with."""
CHECKED = 16
"""Random images for the comparison where none are given."""


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how it compares with the model it was made of.

    Examples:
        >>> found = eq.export("digits-opteq", "shown.safetensors", format="safetensors")
        >>> found.path.name, found.format, found.bytes > 0
        ('shown.safetensors', 'safetensors', True)
    """

    path: Path
    format: Format
    bytes: int
    metadata: dict[str, Any]
    samples: int = 0
    """Images of the comparison; 0 where there was none, as for weights, or without a runtime."""
    difference: float | None = None
    """The largest of the logits, from those of the model solved to 1e-6."""
    same_classes: int | None = None
    """Images for which both name the same class."""
    converged: int | None = None
    """Images that reached the tolerance within the iterations of the graph."""
    iterations: float | None = None
    """In the mean."""


def export(
    run_or_model: str | Path | nn.Module,
    output: str | Path | None = None,
    *,
    format: Format = "onnx",
    tolerance: float = 3e-6,
    max_iterations: int = 200,
    unrolled: int | None = None,
    any_size: bool = False,
    images: Tensor | None = None,
    weights: Literal["last", "best"] = "last",
    overwrite: bool = False,
) -> Exported:
    """Write a model as one file, and compare what it computes with the model.

        eq.export("runs/opteq", "opteq.onnx").difference
        eq.export(model, "opteq.pt2", format="torch-export", images=images)

    The graph takes pixels in [0, 1], any number of images, and returns logits, the residual
    ‖T(y) − y‖ and the iterations of each image. Its metadata hold classes, size, stopping rule and
    the constants of the certificate (`certificate_constants`).

    run_or_model: a run, a trained model by name, or a model, which then needs `images`.
    output: by default the name of the run with the ending of the format, in the present folder.
    format: "onnx", with a `Loop`; "torch-export", with a `while_loop`; or "safetensors", weights
        and recipe in one file, for `eq.load`.
    tolerance, max_iterations: where the loop stops, sample by sample.
    unrolled: so many evaluations of the map in place of the loop, for runtimes without one.
    any_size: images of any size, where the weights do not depend on it.
    images: what the file is compared on; random pixels if not given.

    Examples:
        >>> eq.export("digits-opteq", "digits.safetensors", format="safetensors").bytes < 200_000
        True
        >>> eq.load("digits.safetensors").images.class_names[:3]
        ('0', '1', '2')
    """
    check_choice(get_args(Format), format=format)
    loop = Loop(tolerance=tolerance, max_iterations=max_iterations, unrolled=unrolled)
    path = _place(run_or_model, output, format)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: overwrite=True (--overwrite) replaces it")
    opened = None
    if not isinstance(run_or_model, nn.Module):
        opened = trained_model(run_or_model, weights=weights)
    if format == "safetensors":
        if opened is None or isinstance(run_or_model, nn.Module):
            raise TypeError("weights with their recipe are those of a run: name its folder")
        pack(opened, path, latents=kept_latents(run_or_model))
        return Exported(path, format, path.stat().st_size, {})
    given = run_or_model if opened is None else opened.model
    assert isinstance(given, nn.Module)
    model = copy.deepcopy(given).eval().cpu()
    shown = _images(model, images)
    graph = model_graph(model, shown[:1], loop, any_size=any_size)
    facts = _facts(model, opened, tuple(shown.shape[1:]), loop, any_size)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    probe = shown.new_zeros(2, *shown.shape[1:])  # torch takes a batch of one for a constant
    writer = onnx_file if format == "onnx" else torch_program
    try:
        writer.write(graph, probe, partial, facts, any_size)
        run = writer.runner(partial)
        compared = {} if run is None else _compared(run, model, shown, loop)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(path, format, path.stat().st_size, facts, **compared)


def _place(run_or_model: str | Path | nn.Module, output: str | Path | None, format: str) -> Path:
    if output is not None:
        return Path(output)
    if isinstance(run_or_model, nn.Module):
        raise TypeError("name the file to write: export(model, 'model.onnx')")
    return Path(f"{Path(run_or_model).resolve().name}.{ENDINGS[format]}")


def _images(model: nn.Module, images: Tensor | None) -> Tensor:
    """What the file is made for and compared on."""
    if images is not None:
        return images.detach().cpu()
    known = images_of(model)
    if known is None:
        raise TypeError("the model does not say what size its images have: give some as `images`")
    return torch.rand(CHECKED, *known.image_shape, generator=torch.Generator().manual_seed(0))


def _facts(
    model: nn.Module,
    opened: RecipeModel | None,
    shape: tuple[int, ...],
    loop: Loop,
    any_size: bool,
) -> dict[str, Any]:
    normalization, known = getattr(model, "normalize", None) is not None, images_of(model)
    stops: dict[str, Any] = {"unrolled": loop.unrolled}
    if loop.unrolled is None:
        stops = {
            "stops": "each sample where ‖T(y) − y‖ ≤ tolerance·‖T(y)‖",
            "tolerance": loop.tolerance,
            "max_iterations": loop.max_iterations,
        }
    constants = certificate_constants(model, shape)
    if loop.unrolled is not None:
        # ‖T^K(y₀) − y*‖ ≤ q^K/(1 − q)·‖T(y₀) − y₀‖, for whoever asks before there is a residual.
        limits = constants["contraction"]
        stops["error_of_first_residual"] = [
            None if q is None or q >= 1 else q**loop.unrolled / (1 - q) for q in limits
        ]
    return {
        "made_by": "equilibria",
        "model": type(model).__name__ if opened is None else opened.recipe.model.name,
        "classes": [] if known is None else list(known.class_names),
        "images": {
            "shape": [shape[0], "any", "any"] if any_size else list(shape),
            "values": "pixels from 0 to 1" + ("; normalized inside" if normalization else ""),
        },
        "iteration": stops,
        "certificate": constants,
    }


@torch.no_grad()
def _compared(
    run: Callable[[Tensor], tuple[Tensor, ...]], model: nn.Module, images: Tensor, loop: Loop
) -> dict[str, Any]:
    with solving(model, tolerance=CHECK_TOLERANCE, max_iterations=1000):
        wanted = model(images)
    logits, _, iterations = run(images)
    return {
        "samples": len(images),
        "difference": float((logits - wanted).abs().max()),
        "same_classes": int((logits.argmax(dim=1) == wanted.argmax(dim=1)).sum()),
        "converged": None if loop.unrolled else int((iterations < loop.max_iterations).sum()),
        "iterations": float(iterations.double().mean()),
    }
