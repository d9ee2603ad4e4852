"""The function `export`, which writes a trained model to a file for other programs."""

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
SUFFIXES: Mapping[str, str] = {"onnx": "onnx", "torch-export": "pt2", "safetensors": "safetensors"}
REFERENCE_TOLERANCE = 1e-6
"""Tolerance of the model's solves that an exported file is compared with."""
RANDOM_IMAGES = 16
"""Number of random images for the comparison if the caller provides none."""


@dataclass(frozen=True)
class Exported:
    """An exported file, and its comparison with the original model.

    Attributes:
        path: Path of the file.
        format: Format of the file.
        bytes: Size of the file.
        metadata: Metadata in the file: classes, image size, stopping rule, certificate constants.
        samples: Number of images in the comparison; 0 for safetensors or without a runtime.
        difference: Largest absolute difference between the logits of the file and those of the
            model solved to 1e-6.
        same_classes: Number of images with the same predicted class.
        converged: Number of images that reached the tolerance before the iteration limit.
        iterations: Mean number of iterations.

    Examples:
        >>> exported = eq.export("digits-opteq", "example.safetensors", format="safetensors")
        >>> exported.path.name, exported.format, exported.bytes > 0
        ('example.safetensors', 'safetensors', True)
    """

    path: Path
    format: Format
    bytes: int
    metadata: dict[str, Any]
    samples: int = 0
    difference: float | None = None
    same_classes: int | None = None
    converged: int | None = None
    iterations: float | None = None


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
    """Write a model to one file, and compare the results of the file with the model.

    The exported graph takes any number of images with pixels in [0, 1]. For each image it returns
    logits, the residual ‖T(y) − y‖ and the number of iterations. The metadata contain classes,
    image size, stopping rule and the constants of the certificate (`certificate_constants`).

    Args:
        run_or_model: Folder of a run, name of a trained model, or a model.
        output: File to write; by default the name of the run with the suffix of the format, in the
            current folder.
        format: "onnx", with a `Loop` operator; "torch-export", with a `while_loop`; or
            "safetensors", with weights and recipe for `eq.load`.
        tolerance: The loop stops for a sample when ‖T(y) − y‖ ≤ tolerance·‖T(y)‖.
        max_iterations: Iteration limit of the loop.
        unrolled: Number of evaluations that replace the loop, for runtimes without loops.
        any_size: Whether the graph accepts images of any size; the weights must not depend on it.
        images: Images for the comparison, shape (B, C, H, W); random pixels by default. Required
            for a model without a known image size.
        weights: Weights of the run: "last" or "best".
        overwrite: Whether to replace an existing file.

    Returns:
        The written file, with the comparison.

    Raises:
        ExportError: If the model cannot be written in this format.
        FileExistsError: If the file exists and `overwrite` is False.
        TypeError: If `output` or `images` is needed and missing, or safetensors is requested for a
            model that is not a run.

    Examples:
        >>> eq.export("digits-opteq", "digits.safetensors", format="safetensors").bytes < 200_000
        True
        >>> eq.load("digits.safetensors").images.class_names[:3]
        ('0', '1', '2')
    """
    check_choice(get_args(Format), format=format)
    loop = Loop(tolerance=tolerance, max_iterations=max_iterations, unrolled=unrolled)
    path = _output_path(run_or_model, output, format)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; use overwrite=True (--overwrite) to replace it")
    opened = None
    if not isinstance(run_or_model, nn.Module):
        opened = trained_model(run_or_model, weights=weights)
    if format == "safetensors":
        if opened is None or isinstance(run_or_model, nn.Module):
            raise TypeError(
                "the format safetensors needs the recipe of a run; pass the folder or name of a "
                "run instead of a model"
            )
        pack(opened, path, latents=kept_latents(run_or_model))
        return Exported(path, format, path.stat().st_size, {})
    original = run_or_model if opened is None else opened.model
    assert isinstance(original, nn.Module)
    model = copy.deepcopy(original).eval().cpu()
    examples = _images(model, images)
    graph = model_graph(model, examples[:1], loop, any_size=any_size)
    metadata = _metadata(model, opened, tuple(examples.shape[1:]), loop, any_size)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    probe = examples.new_zeros(2, *examples.shape[1:])  # torch.export would fix a batch of 1
    writer = onnx_file if format == "onnx" else torch_program
    try:
        writer.write(graph, probe, partial, metadata, any_size)
        run = writer.runner(partial)
        comparison = {} if run is None else _compare(run, model, examples, loop)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(path, format, path.stat().st_size, metadata, **comparison)


def _output_path(
    run_or_model: str | Path | nn.Module, output: str | Path | None, format: str
) -> Path:
    if output is not None:
        return Path(output)
    if isinstance(run_or_model, nn.Module):
        raise TypeError("give the file to write: export(model, 'model.onnx')")
    return Path(f"{Path(run_or_model).resolve().name}.{SUFFIXES[format]}")


def _images(model: nn.Module, images: Tensor | None) -> Tensor:
    """Return the images for tracing and comparison."""
    if images is not None:
        return images.detach().cpu()
    spec = images_of(model)
    if spec is None:
        raise TypeError("the image size of the model is unknown; pass some images as `images`")
    generator = torch.Generator().manual_seed(0)
    return torch.rand(RANDOM_IMAGES, *spec.image_shape, generator=generator)


def _metadata(
    model: nn.Module,
    opened: RecipeModel | None,
    shape: tuple[int, ...],
    loop: Loop,
    any_size: bool,
) -> dict[str, Any]:
    is_normalized, spec = getattr(model, "normalize", None) is not None, images_of(model)
    iteration: dict[str, Any] = {"unrolled": loop.unrolled}
    if loop.unrolled is None:
        iteration = {
            "stops": "each sample where ‖T(y) − y‖ ≤ tolerance·‖T(y)‖",
            "tolerance": loop.tolerance,
            "max_iterations": loop.max_iterations,
        }
    constants = certificate_constants(model, shape)
    if loop.unrolled is not None:
        # ‖T^K(y₀) − y*‖ ≤ q^K/(1 − q)·‖T(y₀) − y₀‖ bounds the error by the first residual.
        limits = constants["contraction"]
        iteration["error_of_first_residual"] = [
            None if q is None or q >= 1 else q**loop.unrolled / (1 - q) for q in limits
        ]
    return {
        "made_by": "equilibria",
        "model": type(model).__name__ if opened is None else opened.recipe.model.name,
        "classes": [] if spec is None else list(spec.class_names),
        "images": {
            "shape": [shape[0], "any", "any"] if any_size else list(shape),
            "values": "pixels from 0 to 1" + ("; normalized inside" if is_normalized else ""),
        },
        "iteration": iteration,
        "certificate": constants,
    }


@torch.no_grad()
def _compare(
    run: Callable[[Tensor], tuple[Tensor, ...]], model: nn.Module, images: Tensor, loop: Loop
) -> dict[str, Any]:
    with solving(model, tolerance=REFERENCE_TOLERANCE, max_iterations=1000):
        reference = model(images)
    logits, _, iterations = run(images)
    return {
        "samples": len(images),
        "difference": float((logits - reference).abs().max()),
        "same_classes": int((logits.argmax(dim=1) == reference.argmax(dim=1)).sum()),
        "converged": None if loop.unrolled else int((iterations < loop.max_iterations).sum()),
        "iterations": float(iterations.double().mean()),
    }
