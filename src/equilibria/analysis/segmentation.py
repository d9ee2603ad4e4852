"""Classes of the pixels of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.data import image_to_tensor
from equilibria.data.image_files import as_pixels
from equilibria.equilibrium import solving

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_SIDE = 1024
"""Longest side of a segmented picture, in pixels; larger pictures are reduced."""


@dataclass(frozen=True)
class SegmentedImage:
    """An image and the predicted classes of its pixels."""

    image: Tensor
    """Values in [0, 1], shape (1 or 3, H, W)."""
    classes: Tensor
    """Classes of the pixels, shape (H, W); −1 where the logits are not finite."""
    shares: Mapping[int, float]
    """Share of the pixels by class, the largest first; empty if the logits are not finite."""
    confidence: float
    """Mean over the pixels."""
    iterations: int | None
    """None for a model without an equilibrium, as `converged`."""
    converged: bool | None


@torch.no_grad()
def segment_image(model: nn.Module, inputs: Tensor, picture: Image) -> SegmentedImage:
    """Predict the classes of the pixels of an image.

    Args:
        model: Segmentation model.
        inputs: The image in the size of the training images, shape (1, C, H', W').
        picture: The same part of the image in its own size, for which the classes are
            interpolated. Pictures above `LONGEST_SIDE` are reduced.
    """
    scale = min(1.0, LONGEST_SIDE / max(picture.size))
    height, width = (max(1, round(side * scale)) for side in (picture.height, picture.width))
    with solving(model, record=True) as record:
        probabilities = model(inputs).float().softmax(dim=1).cpu()
    confidence, classes = F.interpolate(
        probabilities, (height, width), mode="bilinear", align_corners=False
    )[0].max(dim=0)
    classes = torch.where(confidence.isfinite(), classes, -1)
    counts = classes[classes >= 0].bincount(minlength=probabilities.shape[1])
    order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
    solution = record.solutions[-1] if record.solutions else None
    return SegmentedImage(
        image=as_pixels(image_to_tensor(picture.resize((width, height)))),
        classes=classes,
        shares={int(index): int(counts[index]) / classes.numel() for index in order},
        confidence=float(confidence.mean()),
        iterations=None if solution is None else int(solution.iterations[0]),
        converged=None if solution is None else bool(solution.converged[0]),
    )
