"""Sheets: positions and labels of images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from equilibria.data import DataSet, Split
from equilibria.report.sheets import MOST_SIDE, Sheet, SheetRow, class_titles, compared, image_png
from equilibria.tasks.image_quality import picture_psnr


def pixels(sheet: Sheet) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sheet.png())))


def texts_inside(figure: Any) -> list[str]:
    """Return the texts, after checking that each is inside the sheet and covers no image."""
    width, height = figure.bbox.width, figure.bbox.height
    boxes = [image.get_window_extent() for image in figure.images]
    for text in figure.texts:
        box = text.get_window_extent()
        assert -0.5 <= box.x0 <= box.x1 <= width + 0.5, text.get_text()
        assert -0.5 <= box.y0 <= box.y1 <= height + 0.5, text.get_text()
        assert not any(
            box.x0 < b.x1 - 1 and b.x0 < box.x1 - 1 and box.y0 < b.y1 - 1 and b.y0 < box.y1 - 1
            for b in boxes
        ), text.get_text()
    return [text.get_text().replace("\n", " ") for text in figure.texts]


@pytest.mark.parametrize("rows", [1, 2, 12])
@pytest.mark.parametrize("size", [(8, 8), (28, 28), (9, 60), (80, 11), (700, 500)])
def test_sheet_has_labels_titles_and_psnrs(rows: int, size: tuple[int, int]) -> None:
    images = torch.rand(3, 1 if rows > 1 else 3, *size)
    sheet = Sheet(
        [
            SheetRow("original", images),
            *(
                compared(f"restored by method {index}", images.sqrt(), [20.0, 30.0, 40.5])
                for index in range(rows - 1)
            ),
        ],
        ["cat", "one & only $x$", "a class with a very long name, longer than its image"],
        "a model on its test images",
    )
    figure = sheet.figure()
    shown = texts_inside(figure)
    assert len(figure.images) == 3 * rows
    for text in ("original", "cat", "a model on its test images"):
        assert text in shown
    assert sum(text.startswith("restored by method") for text in shown) == rows - 1
    assert sum(text.endswith(" dB") for text in shown) == 3 * (rows - 1)
    sides = [max(image.get_size()) for image in figure.images]
    assert min(sides) >= 72
    assert max(sides) <= MOST_SIDE


def test_small_images_are_enlarged_by_an_integer_factor() -> None:
    image = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)
    picture = pixels(Sheet([SheetRow("", image)]))
    expected = (image[0, 0] * 255).round().to(torch.uint8).numpy().repeat(9, 0).repeat(9, 1)
    part = picture[6 : 6 + 72, 6 : 6 + 72]
    assert (part == expected[..., None]).all()


def test_nan_images_are_gray_and_have_no_psnr() -> None:
    images = torch.rand(2, 1, 8, 8)
    broken = images.clone()
    broken[1] = torch.nan
    row = compared("restored", broken, picture_psnr(broken, images).tolist())
    assert row.notes == ["identical", "no answer"]
    assert (pixels(Sheet([row])) == 128).all(axis=2).sum() >= 72 * 72
    assert image_png(broken[1]).startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(1, 2, 4, 4), (0, 1, 4, 4), (1, 4, 4)])
def test_wrong_shapes_are_errors(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 or 3"):
        Sheet([SheetRow("", torch.zeros(shape))])
    with pytest.raises(ValueError, match="got none"):
        Sheet([])


def test_file_is_reproducible() -> None:
    sheet = Sheet([SheetRow("数字", torch.ones(1, 1, 4, 4), ["1.0 dB"])], ["ꙮ"], "हिन्दी")
    assert sheet.png() == sheet.png()


def test_titles_are_class_names_if_there_are_classes() -> None:
    def data(names: tuple[str, ...], **options: Any) -> DataSet:
        split = Split(torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))
        return DataSet("mine", split, split, names, **options)

    labels: Tensor = torch.tensor([1, 0])
    assert class_titles(data(("cat", "dog")), labels) == ["dog", "cat"]
    assert class_titles(data(("face",)), labels) == []
