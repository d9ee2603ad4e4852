"""Predictions of trained models: `predict`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from equilibria.certificates import CertifiedExit
from equilibria.data import find_images, read_pixels
from equilibria.data.image_files import readable
from equilibria.equilibrium import solving
from equilibria.images import ImageSpec, images_of
from equilibria.inference.evaluation import load
from equilibria.models.base import predicted_classes
from equilibria.plugins import Paths
from equilibria.registry import check_at_least_one
from equilibria.solvers import Solution
from equilibria.training.weights_source import Weights


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image.

    Attributes:
        file: Image file; empty for an image from a tensor.
        label: Predicted class; None if the logits are NaN or infinite.
        confidence: Softmax probability of the class.
        iterations: Iterations of the solve; None for a model without an equilibrium.
        converged: Whether the solve converged; None for a model without an equilibrium.
        top: Most likely classes with their probabilities, in descending order.
        certified: Whether the class is certain; None if this was not requested.

    Examples:
        >>> (prediction,) = eq.predict("digits-opteq", eq.data.load_digits().test.images[:1])
        >>> prediction.label, prediction.confidence > 0.5, prediction.converged
        ('0', True, True)
    """

    file: str
    label: str | None
    confidence: float
    iterations: int | None
    converged: bool | None
    top: dict[str, float]
    certified: bool | None = None


@dataclass(frozen=True)
class ClassMap:
    """Predicted class of every pixel of an image.

    Attributes:
        file: Image file; empty for an image from a tensor.
        classes: Index of the class of each pixel, shape (H, W); −1 if the logits are NaN or
            infinite.
        confidence: Mean softmax probability of the predicted classes.
        iterations: Iterations of the solve; None for a model without an equilibrium.
        converged: Whether the solve converged; None for a model without an equilibrium.

    Examples:
        >>> classes = torch.zeros(4, 6, dtype=torch.long)
        >>> eq.inference.ClassMap("street.png", classes, 0.9, 12, True).classes.shape
        torch.Size([4, 6])
    """

    file: str
    classes: Tensor
    confidence: float
    iterations: int | None
    converged: bool | None


def predict(
    run_or_model: str | Path | nn.Module,
    images: Tensor | Paths,
    *,
    weights: Weights = "last",
    device: str | torch.device = "cpu",
    batch_size: int = 64,
    top: int = 1,
    certified: bool = False,
    on_unreadable: Callable[[Exception], None] | None = None,
) -> list[Prediction] | list[ClassMap]:
    """Predict the classes of images, or of their pixels if the model segments.

        eq.predict("runs/mine", "digit.png")[0].label

    Args:
        run_or_model: Model, folder of a run, or name of a pretrained model.
        images: Batch of shape (B, C, H, W) with values in [0, 1], or image files and folders.
            Image files are scaled and cropped like the training images.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        device: Device for the model of a run.
        batch_size: Number of images per batch.
        top: Number of most likely classes to return per image.
        certified: Solve each image only until its class is certain (`CertifiedExit`).
        on_unreadable: Callback for the error of a file that cannot be read, which is then skipped.
            Without it, the error is raised.

    Returns:
        One `Prediction` or `ClassMap` per image.

    Raises:
        ValueError: If the task of the run has no classes.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> [prediction.label for prediction in eq.predict("digits-opteq", images)]
        ['0', '3']
    """
    results = predictions(
        run_or_model,
        images,
        weights=weights,
        device=device,
        batch_size=batch_size,
        top=top,
        certified=certified,
        on_unreadable=on_unreadable,
    )
    return cast("list[Prediction] | list[ClassMap]", list(results))


def predictions(
    run_or_model: str | Path | nn.Module,
    images: Tensor | Paths,
    *,
    weights: Weights = "last",
    device: str | torch.device = "cpu",
    batch_size: int = 64,
    top: int = 1,
    certified: bool = False,
    on_unreadable: Callable[[Exception], None] | None = None,
) -> Iterator[Prediction | ClassMap]:
    """Yield the results of `predict` one by one; files are read when needed, and not kept.

    Args:
        run_or_model: Model, folder of a run, or name of a pretrained model.
        images: Batch of shape (B, C, H, W) with values in [0, 1], or image files and folders.
        weights: "last", or "best" for the weights of the epoch with the best validation score.
        device: Device for the model of a run.
        batch_size: Number of images per batch.
        top: Number of most likely classes to return per image.
        certified: Solve each image only until its class is certain (`CertifiedExit`).
        on_unreadable: Callback for the error of a file that cannot be read, which is then skipped.
            Without it, the error is raised.

    Examples:
        >>> images = eq.data.load_digits().test.images[:2]
        >>> results = eq.inference.predictions("digits-opteq", images)
        >>> [prediction.label for prediction in results]
        ['0', '3']
    """
    check_at_least_one(batch_size=batch_size, top=top)
    if isinstance(run_or_model, nn.Module):
        model = run_or_model
    else:
        model = load(run_or_model, device=device, weights=weights)
        spec = images_of(model)
        if spec is not None and not spec.names_classes:
            raise ValueError(f"the task of the run {run_or_model} has no classes to predict")
    read = None if isinstance(images, Tensor) else _reader(model)
    if certified:
        shape = images.shape[1:] if isinstance(images, Tensor) else _images_of(model).image_shape
        model = CertifiedExit(model, tuple(shape))
    batches: Iterable[tuple[Sequence[str], Tensor]]
    if isinstance(images, Tensor):
        parts = torch.split(images, batch_size) if len(images) else ()
        batches = (([""] * len(part), part) for part in parts)
    else:
        paths = [images] if isinstance(images, str | Path) else images
        files = find_images([Path(path) for path in paths])
        assert read is not None
        batches = _read(files, read, batch_size, on_unreadable)
    return (result for names, batch in batches for result in _predict(model, batch, names, top))


def _read(
    files: Sequence[Path],
    read: Callable[[Path], Tensor],
    batch_size: int,
    on_unreadable: Callable[[Exception], None] | None,
) -> Iterator[tuple[Sequence[str], Tensor]]:
    for start in range(0, len(files), batch_size):
        batch = list(readable(files[start : start + batch_size], read, on_unreadable))
        if batch:
            names, images = zip(*batch, strict=True)
            yield [str(name) for name in names], torch.stack(images)


@torch.no_grad()
def _predict(
    model: nn.Module, batch: Tensor, files: Sequence[str], top: int
) -> list[Prediction | ClassMap]:
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with solving(model, record=True) as record:
            logits = model(batch.to(device)).float().cpu()
    finally:
        model.train(was_training)
    solution = record.solutions[-1] if record.solutions else None
    return answers_of(model, logits, solution, files, top)


def answers_of(
    model: nn.Module, logits: Tensor, solution: Solution | None, files: Sequence[str], top: int
) -> list[Prediction | ClassMap]:
    """Convert the logits of a model to predictions.

    Args:
        model: The model.
        logits: Its output for a batch, float32 on the CPU.
        solution: Result of its solve, if it has an equilibrium.
        files: One file name per image, or an empty string.
        top: Number of the most likely classes to return.
    """
    shares, classes = logits.softmax(dim=1), predicted_classes(logits)
    confidences = shares.amax(dim=1)
    images = images_of(model)
    names = images.class_names if images else ()
    names = names or tuple(map(str, range(logits.shape[1])))
    results: list[Prediction | ClassMap] = []
    for i, file in enumerate(files):
        # Coupled samples are solved as one problem.
        problem = 0 if solution is None or len(solution.iterations) == 1 else i
        iterations = None if solution is None else int(solution.iterations[problem])
        converged = None if solution is None else bool(solution.converged[problem])
        confidence = float(confidences[i].mean())
        if classes.dim() > 1:
            results.append(ClassMap(file, classes[i], confidence, iterations, converged))
            continue
        label = None if classes[i] < 0 else names[int(classes[i])]
        order = shares[i].argsort(descending=True, stable=True)[: 0 if label is None else top]
        likely = {names[int(j)]: float(shares[i, j]) for j in order}
        certified = bool(model.certified[i]) if isinstance(model, CertifiedExit) else None
        results.append(
            Prediction(file, label, confidence, iterations, converged, likely, certified)
        )
    return results


def _reader(model: nn.Module) -> Callable[[Path], Tensor]:
    images = _images_of(model)
    return partial(read_pixels, framing=images.frame, is_gray=images.is_gray)


def _images_of(model: nn.Module) -> ImageSpec:
    images = images_of(model)
    if images is None:
        raise ValueError(
            "the model does not describe its images (model.images): pass images as a tensor, or a "
            "model from eq.load"
        )
    return images
