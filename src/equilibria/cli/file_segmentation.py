"""Segmentations of image files: predicted classes of the pixels, and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import equilibria as eq

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from equilibria.training.experiment import RecipeModel


@dataclass(frozen=True)
class PixelPrediction:
    """Classes of the pixels of one image file."""

    file: str
    drawn: str
    """File of the picture."""
    classes: dict[str, float]
    """Shares of the predicted classes in the pixels, the largest first; empty if the logits are not
    finite."""
    confidence: float
    """Mean over the pixels."""
    iterations: int | None
    """None for a model without an equilibrium, as `converged`."""
    converged: bool | None


def segment_files(
    run: RecipeModel,
    files: Sequence[Path],
    device: torch.device,
    output: Path,
    on_unreadable: Callable[[Exception], None] | None = None,
    *,
    top: int | None = None,
    overwrite: bool = False,
) -> Iterator[PixelPrediction]:
    """Segment image files and draw the classes of their pixels.

    Images are resized and cropped like the training images; the picture has the size of the cropped
    part in the file.

    Args:
        run: Trained segmentation model.
        files: Image files.
        device: Device of the computation.
        output: Folder of the pictures.
        on_unreadable: Called with the error of a file that cannot be read, which is then skipped.
        top: Largest number of classes in each result, those with most pixels first; None: all.
        overwrite: Replace pictures that exist.

    Yields:
        One result per file.
    """
    from equilibria.analysis.segmentation import segment_image
    from equilibria.data.image_files import as_pixels, open_image, readable
    from equilibria.report.figures import drawn_files
    from equilibria.report.segmentation import prediction_png
    from equilibria.training.files import write_atomically

    names, frame = run.images.class_names, run.images.frame
    output.mkdir(parents=True, exist_ok=True)

    def read(item: tuple[Path, tuple[Path, ...]]) -> tuple[Tensor, Image]:
        image = open_image(item[0], is_gray=run.images.is_gray)
        pixels = as_pixels(eq.data.image_to_tensor(frame.apply(image)))
        return pixels[None].to(device), frame.region(image)

    items = zip(files, drawn_files(files, output, "classes", overwrite=overwrite), strict=True)
    for (path, (drawn,)), (inputs, picture) in readable(items, read, on_unreadable):
        segmented = segment_image(run.model, inputs, picture)
        write_atomically(drawn, prediction_png(segmented, names))
        yield PixelPrediction(
            file=str(path),
            drawn=str(drawn),
            classes={names[index]: share for index, share in list(segmented.shares.items())[:top]},
            confidence=segmented.confidence,
            iterations=segmented.iterations,
            converged=segmented.converged,
        )
