"""Drawn segmentations: colors of the panels."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from equilibria.report.segmentation import UNLABELLED, WRONG, distinct_colors, segmentation_png

NAMES = ["road", "tree", "sky"]


def drawn(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def pixels_of(picture: np.ndarray, color: tuple[float, float, float]) -> int:
    """Return the number of pixels of a color, without the legend at the bottom."""
    near = np.abs(picture[: int(0.88 * len(picture))] - 255 * np.array(color)) < 1.5
    return int(near.all(axis=2).sum())


def example() -> tuple[Tensor, Tensor, Tensor]:
    images = torch.zeros(1, 3, 30, 40)
    labels = torch.zeros(1, 30, 40, dtype=torch.long)
    labels[:, :, 20:] = 1
    return images, labels, labels.clone()


def test_panels_show_true_and_predicted_classes() -> None:
    images, labels, predictions = example()
    predictions[:, 15:] = 1
    picture = drawn(segmentation_png(images, labels, predictions, NAMES, opacity=1.0))
    colors = distinct_colors(3)
    first, second = (pixels_of(picture, color) for color in colors[:2])
    # Half and a quarter of a panel are road, half and three quarters tree.
    assert second / first == pytest.approx(1.25 / 0.75, rel=0.05)
    assert pixels_of(picture, colors[2]) == 0
    assert pixels_of(picture, WRONG) / first == pytest.approx(0.25 / 0.75, rel=0.05)


def test_correct_prediction_has_no_errors() -> None:
    images, labels, predictions = example()
    picture = drawn(segmentation_png(images, labels, predictions, NAMES))
    assert pixels_of(picture, WRONG) == 0


def test_unlabelled_pixels_are_neither_right_nor_wrong() -> None:
    images, labels, predictions = example()
    labels[:, :15] = 255
    predictions[:, :15] = 2
    picture = drawn(segmentation_png(images, labels, predictions, NAMES))
    assert pixels_of(picture, WRONG) == 0
    assert pixels_of(picture, UNLABELLED) > 1000


def test_opacity_shows_the_image_below() -> None:
    images, labels, predictions = example()
    opaque, clear = (
        segmentation_png(images, labels, predictions, NAMES, opacity=opacity)
        for opacity in (1.0, 0.0)
    )
    color = distinct_colors(3)[0]
    assert pixels_of(drawn(opaque), color) > 1000
    assert pixels_of(drawn(clear), color) == 0


def test_picture_has_one_row_per_image() -> None:
    names = [f"class {index}" for index in range(19)]
    labels = torch.arange(19).repeat(3, 12, 2)
    images = torch.rand(3, 1, *labels.shape[1:])
    single = drawn(segmentation_png(images[:1], labels[:1], labels[:1], names))
    three = drawn(segmentation_png(images, labels, labels, names))
    assert three.shape[0] > 1.5 * single.shape[0]
    assert three.shape[1] == single.shape[1]


def test_file_is_reproducible() -> None:
    assert segmentation_png(*example(), NAMES) == segmentation_png(*example(), NAMES)


@pytest.mark.parametrize("count", [3, 12, 30])
def test_colors_of_classes_and_errors_are_distinct(count: int) -> None:
    colors = torch.tensor([*distinct_colors(count), WRONG])
    assert len(colors) == count + 1
    distances = torch.pdist(colors)
    assert float(distances.min()) > 0.05


def test_wrong_arguments_are_errors() -> None:
    images, labels, predictions = example()
    with pytest.raises(ValueError, match="labels and predictions must have shape"):
        segmentation_png(images, labels[:, 1:], predictions, NAMES)
    with pytest.raises(ValueError, match="1 or 3"):
        segmentation_png(images[:, :2], labels, predictions, NAMES)
    with pytest.raises(ValueError, match="opacity"):
        segmentation_png(images, labels, predictions, NAMES, opacity=2.0)
