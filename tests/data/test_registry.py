"""Data sets by name, and errors for missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equilibria.data import (
    DataSet,
    DataSetCard,
    MissingDataError,
    Split,
    data_root,
    dataset_card,
    list_datasets,
    load_dataset,
    load_digits,
    register_dataset,
)
from equilibria.data import registry as internals
from equilibria.registry import Registry
from tests.data.formats import write_cifar10

NAMES = [
    "bsd400",
    "bsd68",
    "camvid",
    "celeba",
    "cifar10",
    "cifar10-c",
    "cifar100",
    "cityscapes",
    "digits",
    "fashion-mnist",
    "ffhq",
    "folder",
    "imagenet",
    "imagenet100",
    "imagenette",
    "mazes",
    "mnist",
    "omniglot",
    "omniglot-episodes",
    "sudoku",
]


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUILIBRIA_DATA", raising=False)


def test_list_datasets_returns_all_names() -> None:
    assert list_datasets() == NAMES


GENERATED = ["mazes", "sudoku"]
PUBLISHED = [name for name in NAMES if name not in ["folder", *GENERATED]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_cards_are_complete(name: str) -> None:
    card = dataset_card(name)
    assert card.summary
    assert card.license
    assert card.obtain.endswith(".")
    assert card.address.startswith("http")
    assert (card.classes > 0) == (card.kind != "unlabelled")
    assert bool(card.folders) == bool(card.contents)
    for item in card.downloads:
        algorithm, _, digest = item.checksum.partition(":")
        assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]
        assert int(digest, 16)
        assert any(item.target.startswith(folder.split("/")[0]) for folder in card.folders)


@pytest.mark.parametrize("name", ["imagenet", "imagenet100", "cityscapes", "celeba", "ffhq"])
def test_data_sets_with_registration_have_no_downloads(name: str) -> None:
    assert dataset_card(name).downloads == ()


def test_the_digits_need_no_folder() -> None:
    loaded, expected = load_dataset("digits"), load_digits()
    assert isinstance(loaded.train, Split)
    assert torch.equal(loaded.train.images, expected.train.images)
    assert loaded.image_shape == (1, 8, 8)
    assert (loaded.kind, loaded.num_classes, loaded.license) == ("classification", 10, "CC BY 4.0")


def test_unknown_names_and_options_raise() -> None:
    with pytest.raises(ValueError, match="unknown data set 'cifar-10'; did you mean 'cifar10'"):
        load_dataset("cifar-10")
    with pytest.raises(TypeError, match=r"data set 'digits'.*color"):
        load_dataset("digits", color=True)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "digits"])
def test_the_error_describes_missing_files(name: str, tmp_path: Path) -> None:
    card = dataset_card(name)
    with pytest.raises(MissingDataError) as without_root:
        load_dataset(name)
    with pytest.raises(MissingDataError) as without_files:
        load_dataset(name, tmp_path)
    with pytest.raises(MissingDataError, match="is not a folder"):
        load_dataset(name, tmp_path / "nowhere")
    assert "EQUILIBRIA_DATA" in str(without_root.value)
    assert str(tmp_path) in str(without_files.value)
    for error in (without_root, without_files):
        for part in (repr(name), *card.folders, *card.contents, card.obtain):
            assert part in str(error.value)


def test_the_root_is_the_argument_or_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path / "here" / "cifar-10-batches-py")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "here"))
    assert len(load_dataset("cifar10").train) == 50
    with pytest.raises(MissingDataError):
        load_dataset("cifar10", tmp_path / "empty")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root("~/here") == tmp_path / "here"


def test_the_error_lists_missing_files_of_an_incomplete_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    (folder / "data_batch_3").unlink()
    with pytest.raises(MissingDataError, match=r"incomplete: .*py lacks data_batch_3\*\."):
        load_dataset("cifar10", tmp_path)


def test_subsets_are_balanced_and_depend_on_the_seed(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", samples=20)
    data = load_dataset("cifar10", tmp_path, train_samples=30, test_samples=10)
    assert isinstance(data.train, Split)
    assert isinstance(data.test, Split)
    assert torch.bincount(data.train.labels).tolist() == [3] * 10
    assert torch.bincount(data.test.labels).tolist() == [1] * 10
    again = load_dataset("cifar10", tmp_path, train_samples=30)
    other = load_dataset("cifar10", tmp_path, train_samples=30, subset_seed=1)
    assert isinstance(again.train, Split)
    assert isinstance(other.train, Split)
    assert torch.equal(again.train.images, data.train.images)
    assert not torch.equal(other.train.images, data.train.images)
    with pytest.raises(ValueError, match="from 1 to 100"):
        load_dataset("cifar10", tmp_path, train_samples=101)


def test_custom_data_sets_can_be_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "_loaders", Registry("data set"))
    monkeypatch.setattr(internals, "_cards", {})

    def load(folder: Path, *, samples: int = 2) -> DataSet:
        split = Split(torch.zeros(samples, 1, 1, 1), torch.zeros(samples, dtype=torch.long))
        return DataSet(folder.name, split, split, ("only",))

    card = DataSetCard("mine", folders=("some", "mine"), contents=("*.dat",), license="mine alone")
    register_dataset(card, load)
    with pytest.raises(ValueError, match="exists already"):
        register_dataset(card, load)
    (tmp_path / "some").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.dat").touch()
    data = load_dataset("mine", tmp_path, samples=3)
    assert (data.name, len(data.train), data.license) == ("mine", 3, "mine alone")
