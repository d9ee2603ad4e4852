"""A fingerprint is that of the data: the same wherever they lie, another where some are missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from equilibria.data import Selection, Split, fingerprint, load_dataset, load_digits
from tests.data.formats import random_bytes, write_class_folders, write_image, write_mnist
from tests.data.test_sets import WNIDS


def test_the_same_data_have_the_same_fingerprint() -> None:
    first, again = load_digits(), load_digits()
    assert fingerprint(first.train) == fingerprint(again.train)
    assert fingerprint(first.train) != fingerprint(first.test)
    assert fingerprint(first.train).startswith("1347 samples, ")


def test_fewer_samples_and_other_labels_show() -> None:
    data = load_digits()
    assert isinstance(data.train, Split)
    fewer = data.train.subset(torch.arange(len(data.train) // 4, len(data.train)))
    labels = data.train.labels.clone()
    labels[700] = (labels[700] + 1) % 10
    others = [fewer, Split(data.train.images, labels), Split(data.train.images / 2, labels)]
    assert len({fingerprint(source) for source in (data.train, *others)}) == 4


def test_a_selection_is_as_the_samples_themselves() -> None:
    data = load_digits()
    assert isinstance(data.train, Split)
    chosen = torch.arange(3, 200, 7)
    assert fingerprint(Selection(data.train, chosen)) == fingerprint(data.train.subset(chosen))


def test_a_folder_that_moves_keeps_its_fingerprint(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "a" / "imagenette2", WNIDS)
    before = fingerprint(load_dataset("imagenette", tmp_path / "a").train)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert fingerprint(load_dataset("imagenette", tmp_path / "b").train) == before


def test_files_that_go_or_come_or_change_show(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "imagenette2", WNIDS, images=4)

    def found() -> tuple[str, str]:
        data = load_dataset("imagenette", tmp_path)
        return fingerprint(data.train), fingerprint(data.test)

    first = tmp_path / "imagenette2" / "train" / WNIDS[3] / "0.png"
    seen = [found()]
    first.rename(first.with_name("other.png"))
    seen.append(found())
    first.with_name("other.png").unlink()
    seen.append(found())
    write_image(first, random_bytes(9, 12, 3))
    seen.append(found())
    assert [len(set(part)) for part in zip(*seen, strict=True)] == [4, 1]


def test_arrays_on_disk_have_one_too(tmp_path: Path) -> None:
    for root, zipped in ((tmp_path / "a", True), (tmp_path / "b", False)):
        write_mnist(root / "MNIST" / "raw", zipped=zipped)
    one, same = (load_dataset("mnist", tmp_path / name) for name in "ab")
    assert fingerprint(one.train) == fingerprint(same.train)
    shorter = load_dataset("mnist", tmp_path / "a", train_samples=15)
    assert fingerprint(shorter.train) != fingerprint(one.train)


def test_of_no_samples_and_of_files_that_are_gone(tmp_path: Path) -> None:
    empty = Split(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long))
    assert fingerprint(empty).startswith("0 samples")
    write_class_folders(tmp_path / "imagenette2", WNIDS)
    data = load_dataset("imagenette", tmp_path)
    before = fingerprint(data.test)
    shutil.rmtree(tmp_path / "imagenette2" / "val")
    assert fingerprint(data.test) != before
