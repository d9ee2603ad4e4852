"""Images of the user: folders, tables, and map-style `Dataset` objects."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from equilibria.data import (
    Batches,
    DataFileError,
    DataSet,
    Framing,
    MissingDataError,
    Split,
    fingerprint,
    from_dataset,
    load_dataset,
    stratified_split,
)
from equilibria.data.image_files import read_image
from equilibria.data.sets.own import list_own_images
from equilibria.data.source import known_labels
from equilibria.data.survey import mean_and_deviation, survey
from tests.data.photos import KINDS, photo, write_photos


def load(folder: Path, **options: Any) -> DataSet:
    return load_dataset("folder", folder, **{"size": 8, **options})


def labels_of(data: DataSet, part: str) -> list[int]:
    labels = known_labels(getattr(data, part))
    assert labels is not None
    return labels.tolist()


def test_folders_are_classes_and_a_fifth_of_each_is_held_out(tmp_path: Path) -> None:
    data = load(write_photos(tmp_path / "my photos"))
    assert data.class_names == KINDS
    assert data.name == "my photos"
    assert data.image_shape == (3, 8, 8)
    assert labels_of(data, "train") == [0] * 8 + [1] * 8
    assert labels_of(data, "test") == [0, 0, 1, 1]
    assert data.validation is None
    for part in (data.train, data.test):
        for images, labels in Batches(part, 5):
            rows = images.mean(dim=(1, 3))
            assert torch.equal((rows[:, 0] < rows[:, -1]).long(), labels)


def test_the_split_does_not_depend_on_the_location_of_the_folder(tmp_path: Path) -> None:
    first = load(write_photos(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    second = load(tmp_path / "b")
    for part in ("train", "test"):
        assert fingerprint(getattr(first, part)) == fingerprint(getattr(second, part))
    assert fingerprint(first.train) != fingerprint(load(tmp_path / "a", test=0.4).train)


def test_options_for_gray_images_and_sizes(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 5)
    assert load(folder, size=[4, 6], gray=True).image_shape == (1, 4, 6)
    assert load(folder, size=4, resize=6).framing == Framing.make(4, 6)


def test_images_at_any_depth_are_listed_except_hidden_ones(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 3)
    deep = folder / KINDS[0] / "2024" / "mai"
    deep.mkdir(parents=True)
    photo(0, 9).save(deep / "deep.PNG")
    for hidden in (".cache", "__MACOSX"):
        (folder / hidden).mkdir()
        photo(0, 9).save(folder / hidden / "image.png")
    photo(0, 9).save(folder / KINDS[0] / "._image 00.png", format="PNG")
    for name in ("notes.txt", "notes 2.TXT", "iphone.heic", "README"):
        (folder / KINDS[1] / name).write_text("text")
    (folder / "empty").mkdir()
    result = list_own_images(folder)
    assert result.class_names == KINDS
    assert len(result.paths) == 7
    assert any(path.endswith("deep.PNG") for path in result.paths)
    assert dict(result.others) == {".txt": 2, ".heic": 1, "README": 1}


@pytest.mark.parametrize("name", ["val", "valid", "Validation"])
def test_folders_of_parts(tmp_path: Path, name: str) -> None:
    for part, count in (("train", 4), (name, 3), ("test", 2)):
        write_photos(tmp_path / part, count)
    data = load(tmp_path)
    assert data.class_names == KINDS
    assert data.validation is not None
    assert [len(data.train), len(data.validation), len(data.test)] == [8, 6, 4]
    assert labels_of(data, "validation") == [0] * 3 + [1] * 3
    with pytest.raises(ValueError, match=r"to test on: remove data\.options\.test"):
        load(tmp_path, test=0.3)
    shutil.rmtree(tmp_path / "test")
    data = load(tmp_path)
    assert [len(data.train), data.validation, len(data.test)] == [8, None, 6]
    shutil.rmtree(tmp_path / name)
    data = load(tmp_path)
    assert [len(data.train), len(data.test)] == [6, 2]


def test_a_class_can_be_named_train(tmp_path: Path) -> None:
    """The folder `train` is a class if it holds images, or if other classes are next to it."""
    assert load(write_photos(tmp_path / "a", 3, ("plane", "train"))).class_names == (
        "plane",
        "train",
    )
    assert load(write_photos(tmp_path / "b", 3, ("test", "train"))).class_names == ("test", "train")


def test_every_class_needs_training_images(tmp_path: Path) -> None:
    write_photos(tmp_path / "train", 2)
    write_photos(tmp_path / "test", 2, ("Himmel", "Wasser"))
    with pytest.raises(DataFileError, match="the class 'Wasser' has no training images"):
        load(tmp_path)


def test_numeric_class_names_are_sorted_by_value(tmp_path: Path) -> None:
    data = load(write_photos(tmp_path / "photos", 2, ("10", "9", "1")))
    assert data.class_names == ("1", "9", "10")


@pytest.mark.skipif(os.name != "posix", reason="file names are text on other systems")
def test_class_names_with_invalid_bytes(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 2)
    try:
        os.rename(folder / KINDS[0], os.fsencode(folder) + b"/caf\xe9")
    except OSError:
        pytest.skip("the file system only allows text")
    data = load(folder)
    assert data.class_names == ("caf\ufffd", KINDS[1])
    assert len(data.train.fetch(torch.arange(2))[0]) == 2
    fingerprint(data.train)


def test_a_class_with_one_image_is_only_trained_on(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 2)
    write_photos(tmp_path / "other", 1, ("single",))
    (tmp_path / "other" / "single").rename(tmp_path / "photos" / "single")
    data = load(tmp_path / "photos")
    assert data.class_names == ("Himmel", "single", "земля")
    assert sorted(labels_of(data, "train")) == [0, 1, 2]
    assert sorted(labels_of(data, "test")) == [0, 2]


def test_stratified_split_holds_out_a_minimum_per_class() -> None:
    labels = torch.tensor([0] * 30 + [1] * 3 + [2] * 2 + [3])
    rest, held_out = stratified_split(Split(torch.zeros(36, 1, 1, 1), labels), 0.1, 0, least=1)
    assert torch.bincount(held_out.labels, minlength=4).tolist() == [3, 1, 1, 0]
    assert torch.bincount(rest.labels).tolist() == [27, 2, 1, 1]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ((), "no folder in it holds images; sort them into one folder per class, or pass a table"),
        (("Himmel",), r"there is only one class \(Himmel\)"),
    ],
)
def test_a_folder_needs_at_least_two_classes(
    tmp_path: Path, classes: tuple[str, ...], message: str
) -> None:
    write_photos(tmp_path, 2, classes)
    photo(0, 0).save(tmp_path / "loose.png")
    with pytest.raises(DataFileError, match=message):
        load(tmp_path)


def test_the_folder_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"set data\.root"):
        load_dataset("folder")
    with pytest.raises(MissingDataError, match="there is no folder"):
        load_dataset("folder", tmp_path / "nowhere")


ROWS = [("a/1.png", "Himmel"), ("a/2.png", "Himmel"), ("b c.png", "земля"), ("d.png", "земля")]


def write_table(folder: Path, text: str, name: str = "labels.csv", encoding: str = "utf-8") -> Path:
    (folder / "a").mkdir(exist_ok=True)
    for file, kind in ROWS:
        photo(KINDS.index(kind), 0).save(folder / file)
    (folder / name).write_text(text, encoding=encoding)
    return folder


TABLES = {
    "header": "file,label\n" + "".join(f"{file},{kind}\n" for file, kind in ROWS),
    "none": "".join(f"{file},{kind}\n" for file, kind in ROWS),
    "columns": "id;Class;x;Filename\n" + "".join(f"1;{kind};;{file}\n" for file, kind in ROWS),
    "unknown header": "picture\twhat\n\n" + "".join(f"{file}\t{kind}\r\n" for file, kind in ROWS),
    "quoted": "file,label\n" + "".join(f'"{file}", "{kind}"\n' for file, kind in ROWS),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_tables_of_files_and_labels(tmp_path: Path, kind: str, encoding: str) -> None:
    data = load(write_table(tmp_path, TABLES[kind], encoding=encoding), labels="labels.csv")
    assert data.class_names == KINDS
    assert (len(data.train), len(data.test)) == (2, 2)
    assert data.name == "labels"


def test_a_table_can_have_a_column_of_parts(tmp_path: Path) -> None:
    parts = ("train", "val", "", "test")
    rows = "".join(f"{file},{kind},{p}\n" for (file, kind), p in zip(ROWS, parts, strict=True))
    data = load(write_table(tmp_path, f"file,label,split\n{rows}"), labels="labels.csv")
    assert data.validation is not None
    result = [labels_of(data, part) for part in ("train", "validation", "test")]
    assert result == [[0, 1], [0], [1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no images"),
        ("file,label\n", "lists no images"),
        ("a/1.png\n", "line 1 must have a file and a label"),
        ("file,label\na/1.png,x\nb c.png,\n", "line 3 must have a file and a label"),
        ("file,label,split\na/1.png,x,dev\n", "line 2 .* one of train"),
        ("a/1.png,x\nno.png,y\nnone.png,y\n", r"no\.png \(line 2\), and 1 others of 3 files"),
        ("a/1.png,x\na/2.png,x\n", "only one class"),
        (f"a/1.png,{'x' * 200_000}\n", "not a table"),
    ],
)
def test_errors_in_a_table_are_reported(tmp_path: Path, text: str, message: str) -> None:
    write_table(tmp_path, text)
    with pytest.raises(DataFileError, match=message):
        load(tmp_path, labels="labels.csv")


def test_a_survey_has_sizes_colors_and_problems(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 9)
    result = survey(list_own_images(folder).paths)
    assert (result.height, result.width, result.is_gray) == (13, 16, False)
    assert 1.1 < result.aspects[0] <= result.aspects[1] < 1.5
    (folder / KINDS[0] / "image 00.png").write_text("no image")
    (problem,) = survey(list_own_images(folder).paths).problems
    assert "image 00.png: cannot be read as an image" in str(problem)


def test_a_survey_detects_gray_images_in_rgb_files_and_rotation(
    tmp_path: Path,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for i in range(4):
        gray = photo(0, i, (16, 32)).convert("L")
        gray.convert("RGB" if i % 2 else "L").save(tmp_path / f"{i}.jpg", exif=exif)
    result = survey([str(path) for path in sorted(tmp_path.glob("*.jpg"))])
    assert (result.height, result.width, result.is_gray) == (32, 16, True)


def test_a_survey_without_a_readable_image_raises(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(DataFileError, match=r"a\.png"):
        survey([str(tmp_path / "a.png")])


def test_mean_and_standard_deviation_match_the_images(tmp_path: Path) -> None:
    images = torch.rand(40, 3, 5, 4, dtype=torch.float64)
    mean, deviation = mean_and_deviation(Split(images, torch.zeros(40)))
    assert mean == pytest.approx(images.mean(dim=(0, 2, 3)).tolist(), abs=1e-4)
    spread = images.std(dim=(0, 2, 3), correction=0)
    assert deviation == pytest.approx(spread.tolist(), abs=1e-4)
    flat = Split(torch.full((3, 1, 2, 2), 0.5), torch.zeros(3))
    assert mean_and_deviation(flat) == ((0.5,), (1.0,))


def test_large_jpegs_are_decoded_at_a_reduced_size(tmp_path: Path) -> None:
    """The pixels are nearly the same, with any rotation."""
    path, exif = tmp_path / "large.jpg", Image.Exif()
    exif[0x0112] = 6
    for size in ((400, 640), (640, 300)):
        smooth = photo(1, 0, (8, 8)).resize(size, Image.Resampling.BICUBIC)
        smooth.save(path, quality=95, exif=exif)
        whole = read_image(path)
        for framing in (Framing.make(24), Framing.make((16, 40)), Framing.make(24, 32)):
            image = Image.fromarray(whole.permute(1, 2, 0).numpy())
            expected = np.array(framing.apply(image)).astype(int)
            result = read_image(path, framing).permute(1, 2, 0).numpy().astype(int)
            assert result.shape == expected.shape
            assert np.abs(result - expected).max() <= 12


class Photos(Dataset[Any]):
    """Data set of Pillow images or tensors."""

    def __init__(self, count: int = 20, as_tensor: bool = False, gray: bool = False) -> None:
        self.count, self.as_tensor, self.gray = count, as_tensor, gray

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index >= self.count:
            raise IndexError(index)
        image = photo(index % 2, index, (10, 12)).convert("L" if self.gray else "RGB")
        if not self.as_tensor:
            return image, index % 2
        pixels = torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1)
        return pixels, torch.tensor(index % 2)


class Labelled(Photos):
    classes = KINDS

    @property
    def targets(self) -> list[int]:
        return [index % 2 for index in range(self.count)]


def test_from_dataset_accepts_map_style_datasets() -> None:
    data = from_dataset(Labelled(), size=8)
    assert data.class_names == KINDS
    assert data.image_shape == (3, 8, 8)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert sorted(labels_of(data, "test")) == [0, 0, 1, 1]
    tensors = from_dataset(Photos(as_tensor=True, gray=True), class_names=["a", "b"])
    assert tensors.image_shape == (1, 10, 12)
    images, labels = tensors.train.fetch(torch.arange(3))
    assert images.dtype == torch.float32
    assert 0.1 < float(images.mean()) < 0.9
    assert labels.dtype == torch.long
    parts = from_dataset(Labelled(), test=Photos(6), validation=Photos(4), size=8)
    assert parts.validation is not None
    assert [len(parts.train), len(parts.validation), len(parts.test)] == [20, 4, 6]


def test_pillow_images_are_framed_like_files(tmp_path: Path) -> None:
    image, _ = Photos()[3]
    image.save(tmp_path / "3.png")
    images, _ = from_dataset(Labelled(), test=Photos(), size=8).test.fetch(torch.tensor([3]))
    assert torch.equal(images[0], read_image(tmp_path / "3.png", Framing.make(8)) / 255)


def test_labels_of_subsets_and_tensor_datasets_are_known() -> None:
    chosen = [1, 3, 4, 5, 6, 7, 8, 10, 12, 14]
    data = from_dataset(Subset(Labelled(), chosen), test=Photos(4), size=8)
    assert data.class_names == KINDS
    assert labels_of(data, "train") == [index % 2 for index in chosen]
    tensors = TensorDataset(torch.rand(10, 1, 4, 4), torch.arange(10) % 3)
    data = from_dataset(tensors, test=tensors)
    assert isinstance(data.train, Split)
    assert data.class_names == ("0", "1", "2")


class Wrong(Photos):
    def __init__(self, item: Any) -> None:
        super().__init__()
        self.item = item

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.item, 0


class Mixed(Photos):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return photo(0, index, (9, 9 + index)), 0


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            torch.full((3, 4, 4), -1.5),
            r"values in \[0, 1\], got shape \(3, 4, 4\) and values from -1.5 to -1.5",
        ),
        (torch.zeros(2, 3, 4, 4), r"shape \(C, H, W\)"),
    ],
)
def test_invalid_images_of_a_dataset_raise(item: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dataset(Wrong(item), class_names=["a", "b"])


def test_a_dataset_needs_classes_and_images_of_one_size() -> None:
    with pytest.raises(ValueError, match="pass class_names"):
        from_dataset(Photos(), size=8)
    with pytest.raises(TypeError, match="a Pillow image, got ndarray"):
        from_dataset(Wrong(np.zeros((4, 4))), class_names=["a", "b"])
    data = from_dataset(Mixed(), class_names=["a", "b"])
    with pytest.raises(ValueError, match=r"same shape.*set `size`"):
        data.train.fetch(torch.arange(3))
