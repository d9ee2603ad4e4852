"""Fingerprints identify data, independently of their folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from equilibria.data import Selection, Split, fingerprint, load_dataset, load_digits
from tests.data.formats import random_bytes, write_class_folders, write_image, write_mnist
from tests.data.test_sets import WNIDS


def test_equal_data_have_equal_fingerprints() -> None:
    first, again = load_digits(), load_digits()
    assert fingerprint(first.train) == fingerprint(again.train)
    assert fingerprint(first.train) != fingerprint(first.test)
    assert fingerprint(first.train).startswith("1347 samples, ")


def test_missing_samples_and_other_labels_change_the_fingerprint() -> None:
    data = load_digits()
    assert isinstance(data.train, Split)
    fewer = data.train.subset(torch.arange(len(data.train) // 4, len(data.train)))
    labels = data.train.labels.clone()
    labels[700] = (labels[700] + 1) % 10
    others = [fewer, Split(data.train.images, labels), Split(data.train.images / 2, labels)]
    assert len({fingerprint(source) for source in (data.train, *others)}) == 4


def test_a_selection_has_the_fingerprint_of_its_samples() -> None:
    data = load_digits()
    assert isinstance(data.train, Split)
    chosen = torch.arange(3, 200, 7)
    assert fingerprint(Selection(data.train, chosen)) == fingerprint(data.train.subset(chosen))


def test_moving_a_folder_keeps_the_fingerprint(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "a" / "imagenette2", WNIDS)
    before = fingerprint(load_dataset("imagenette", tmp_path / "a").train)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert fingerprint(load_dataset("imagenette", tmp_path / "b").train) == before


def test_removed_added_and_changed_files_change_the_fingerprint(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "imagenette2", WNIDS, images=4)

    def fingerprints() -> tuple[str, str]:
        data = load_dataset("imagenette", tmp_path)
        return fingerprint(data.train), fingerprint(data.test)

    first = tmp_path / "imagenette2" / "train" / WNIDS[3] / "0.png"
    results = [fingerprints()]
    first.rename(first.with_name("other.png"))
    results.append(fingerprints())
    first.with_name("other.png").unlink()
    results.append(fingerprints())
    write_image(first, random_bytes(9, 12, 3))
    results.append(fingerprints())
    assert [len(set(part)) for part in zip(*results, strict=True)] == [4, 1]


def test_data_in_memory_have_a_fingerprint(tmp_path: Path) -> None:
    for root, zipped in ((tmp_path / "a", True), (tmp_path / "b", False)):
        write_mnist(root / "MNIST" / "raw", zipped=zipped)
    first, same = (load_dataset("mnist", tmp_path / name) for name in "ab")
    assert fingerprint(first.train) == fingerprint(same.train)
    shorter = load_dataset("mnist", tmp_path / "a", train_samples=15)
    assert fingerprint(shorter.train) != fingerprint(first.train)


def test_empty_sources_and_missing_files_have_a_fingerprint(tmp_path: Path) -> None:
    empty = Split(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long))
    assert fingerprint(empty).startswith("0 samples")
    write_class_folders(tmp_path / "imagenette2", WNIDS)
    data = load_dataset("imagenette", tmp_path)
    before = fingerprint(data.test)
    shutil.rmtree(tmp_path / "imagenette2" / "val")
    assert fingerprint(data.test) != before
