"""`equilibria predict` with runs that segment images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from equilibria.data import DataSet, DataSetCard, Split, register_dataset
from equilibria.data import registry as internals
from equilibria.registry import Registry
from tests.program import invoke

NAMES = ("wall", "red box", "green box")
COLORS = torch.tensor([[0.2, 0.2, 0.25], [0.9, 0.2, 0.1], [0.1, 0.8, 0.3]])
HEIGHT, WIDTH = 24, 32


def boxes(samples: int) -> tuple[Tensor, Tensor]:
    """Return images of a red and a green box on a wall, and the classes of their pixels."""
    labels = torch.zeros(samples, HEIGHT, WIDTH, dtype=torch.long)
    for i in range(samples):
        for label, left in ((1, 2 + i % 4), (2, 17 + i % 5)):
            top = 2 + (3 * i + 5 * label) % 9
            labels[i, top : top + 10, left : left + 9] = label
    return COLORS[labels].movedim(3, 1).contiguous(), labels


def load_boxes() -> DataSet:
    images, labels = boxes(48)
    train, test = Split(images[:40], labels[:40]), Split(images[40:], labels[40:])
    return DataSet("boxes", train, test, NAMES, kind="segmentation", ignore_index=255)


@pytest.fixture(scope="module", autouse=True)
def _boxes() -> Iterator[None]:
    """Register the data set `boxes` for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        loaders: Registry[object] = Registry("data set")
        loaders._factories.update(internals._loaders._factories)
        patch.setattr(internals, "_loaders", loaders)
        patch.setattr(internals, "_cards", dict(internals._cards))
        register_dataset(DataSetCard("boxes", kind="segmentation", classes=3), load_boxes)
        yield


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recipe = {
        "model": {
            "name": "deep-opteq-segmentation",
            "options": {"channels": 12, "widths": [12], "head_width": 12, "stride": 2},
        },
        "data": {"name": "boxes"},
        "training": {"epochs": 20, "batch_size": 8, "learning_rate": 0.02},
        "threads": 1,
    }
    (folder / "boxes.yaml").write_text(yaml.safe_dump(recipe))
    result = invoke("train", folder / "boxes.yaml", "--output", folder / "run")
    assert result.exit_code == 0, result.output
    return folder / "run"


def save(image: Tensor, path: Path, size: tuple[int, int]) -> Path:
    pixels = (image.movedim(0, 2) * 255).round().to(torch.uint8).numpy()
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(path)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """One of the test images, four times as large."""
    return save(boxes(48)[0][44], tmp_path / "images" / "box.png", (4 * WIDTH, 4 * HEIGHT))


def test_predict_reports_the_shares_of_classes(
    segmenter: Path, picture: Path, tmp_path: Path
) -> None:
    result = invoke("predict", segmenter, picture, "--output", tmp_path / "drawn", "--json")
    assert result.exit_code == 0, result.output
    (prediction,) = json.loads(result.output)
    labels = boxes(48)[1][44]
    assert next(iter(prediction["classes"])) == "wall"
    for label, name in enumerate(NAMES):
        share = float((labels == label).float().mean())
        assert prediction["classes"][name] == pytest.approx(share, abs=0.04)
    assert sum(prediction["classes"].values()) == pytest.approx(1)
    assert prediction["file"] == str(picture)
    assert 0.5 < prediction["confidence"] <= 1
    assert prediction["iterations"] > 0
    assert prediction["converged"] is True


def test_picture_shows_classes_at_their_positions(
    segmenter: Path, picture: Path, tmp_path: Path
) -> None:
    result = invoke("predict", segmenter, picture, "--output", tmp_path / "drawn", "--json")
    (prediction,) = json.loads(result.output)
    with Image.open(prediction["drawn"]) as drawing:
        shown = np.asarray(drawing.convert("RGB")).astype(int)
    # The overlay is the right half, in which the red box is left of the green one.
    overlay = shown[: int(0.8 * len(shown)), shown.shape[1] // 2 :]
    red, green, blue = overlay[..., 0], overlay[..., 1], overlay[..., 2]
    orange_columns = np.nonzero((red > green + 40) & (green > blue + 40))[1]
    green_columns = np.nonzero((green > red + 40) & (green > blue + 40))[1]
    assert len(orange_columns) > 1000
    assert len(green_columns) > 1000
    assert orange_columns.mean() < green_columns.mean()


def test_picture_has_the_proportions_of_training_images(segmenter: Path, tmp_path: Path) -> None:
    """The model gets the center of the image in these proportions."""
    shapes = {}
    for name, size in (("tall", (80, 160)), ("wide", (160, 60)), ("large", (320, 240))):
        file = save(boxes(1)[0][0], tmp_path / "images" / f"{name}.png", size)
        (prediction,) = json.loads(
            invoke("predict", segmenter, file, "--output", tmp_path / "drawn", "--json").output
        )
        with Image.open(prediction["drawn"]) as drawing:
            shapes[name] = drawing.size
    assert shapes["tall"] == shapes["wide"] == shapes["large"]


def test_images_are_cropped_not_stretched(segmenter: Path, tmp_path: Path) -> None:
    """More wall on the left and right is cropped and does not change the prediction."""
    image, _ = boxes(1)
    wide = COLORS[0][:, None, None].expand(3, HEIGHT, 2 * WIDTH).clone()
    wide[:, :, WIDTH // 2 : WIDTH // 2 + WIDTH] = image[0]
    files = (
        save(image[0], tmp_path / "images" / "narrow.png", (WIDTH, HEIGHT)),
        save(wide, tmp_path / "images" / "wide.png", (2 * WIDTH, HEIGHT)),
    )
    result = invoke("predict", segmenter, *files, "--output", tmp_path / "drawn", "--json")
    narrow, wider = json.loads(result.output)
    assert narrow["classes"] == wider["classes"]
    assert narrow["confidence"] == wider["confidence"]


def test_pictures_do_not_overwrite_images_or_each_other(
    segmenter: Path, picture: Path, tmp_path: Path
) -> None:
    folder = picture.parent
    other = save(boxes(1)[0][0], folder / "more" / "box.jpg", (WIDTH, HEIGHT))
    before = picture.read_bytes()
    predictions = json.loads(
        invoke("predict", segmenter, picture, other, "--output", folder, "--json").output
    )
    assert len({Path(p["drawn"]).name for p in predictions}) == 2
    assert all(Path(p["drawn"]).is_file() for p in predictions)
    assert picture.read_bytes() == before


def test_table_lists_the_classes(
    segmenter: Path, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("predict", segmenter, Path("images"))
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for part in ("wall ", "red box ", "green box ", "Confidence", "yes"):
        assert part in text
    assert Path("equilibria-predictions/box-classes.png").is_file()


def test_unreadable_file_is_an_error(segmenter: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    result = invoke("predict", segmenter, tmp_path / "text.png", "--output", tmp_path / "drawn")
    assert result.exit_code == 1
    assert "text.png: cannot be read as an image" in " ".join(result.output.split())


def test_gray_and_transparent_files_are_converted_to_color(segmenter: Path, tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P"):
        Image.new(mode, (20, 30)).save(tmp_path / f"{mode}.png")
    result = invoke("predict", segmenter, tmp_path, "--output", tmp_path / "drawn", "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.output)) == 3


def test_evaluate_draws_test_images(segmenter: Path, tmp_path: Path) -> None:
    result = invoke("evaluate", segmenter, "--draw", tmp_path / "drawn.png", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["mean_iou"] > 0
    with Image.open(tmp_path / "drawn.png") as picture:
        assert picture.width > picture.height / 2


def test_drawing_for_a_run_that_classifies_images_is_an_error(tmp_path: Path) -> None:
    options = ("training.epochs=1", "data.options.train_samples=64")
    assert invoke("train", "digits-opteq", *options, "--output", tmp_path / "run").exit_code == 0
    result = invoke("evaluate", tmp_path / "run", "--draw", tmp_path / "drawn.png")
    assert result.exit_code == 2
    assert "needs a run that segments images" in " ".join(result.output.split())
