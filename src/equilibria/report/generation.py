"""Sheets of samples and reconstructions of a generator."""

from __future__ import annotations

import torch

from equilibria.analysis.generation import ReconstructedImages, Samples
from equilibria.data import DataSet
from equilibria.report.sheets import Sheet, SheetRow, class_titles, compared

COLUMNS = 10
"""Images in a row of a sheet."""


def samples_sheet(samples: Samples) -> Sheet:
    """Draw all samples, in rows of `COLUMNS`."""
    lines = enumerate(torch.split(samples.images, COLUMNS))
    rows = [SheetRow("" if index else "samples", images) for index, images in lines]
    return Sheet(rows, heading=f"{samples.model}, trained on {samples.trained_on}")


def reconstruction_sheet(reconstructed: ReconstructedImages, data: DataSet) -> Sheet:
    """Draw the first test images, and below them one row per way of computing the latents.

    Args:
        reconstructed: Test images and their reconstructions.
        data: Data set of the images, whose name and classes are shown.
    """
    rows = [SheetRow("original", reconstructed.originals[:COLUMNS])]
    rows += [
        compared(f"latents by {way}", images[:COLUMNS], reconstructed.psnr[way])
        for way, images in reconstructed.images.items()
    ]
    heading = f"{reconstructed.model} on test images of {data.name}"
    return Sheet(rows, class_titles(data, reconstructed.labels), heading)
