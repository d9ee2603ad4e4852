"""The digits of scikit-learn, and stratified splits."""

from __future__ import annotations

import pytest
import torch
from sklearn import datasets

from equilibria.data import Split, load_digits, stratified_split
from equilibria.data.sets import arrays


def fingerprints(split: Split) -> list[tuple[float, ...]]:
    return [tuple(image.flatten().tolist()) for image in split.images]


def test_digits_are_images_between_zero_and_one() -> None:
    data = load_digits()
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images.shape[1:] == (1, 8, 8)
    assert data.channels == 1
    assert data.class_names == tuple("0123456789")
    assert float(data.train.images.min()) == 0
    assert float(data.train.images.max()) == 1


def test_digits_are_those_of_scikit_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file is read directly, or by scikit-learn if it has moved."""
    expected = datasets.load_digits()
    read = load_digits()
    monkeypatch.setattr(arrays, "find_spec", lambda name: None)
    for data in (read, load_digits()):
        pairs = list(zip(*data.train.fetch(torch.arange(len(data.train))), strict=True))
        pairs += zip(*data.test.fetch(torch.arange(len(data.test))), strict=True)
        result = sorted([*image.flatten().tolist(), int(label)] for image, label in pairs)
        rows = zip(expected.data / 16, expected.target, strict=True)
        assert result == sorted([*image.tolist(), int(label)] for image, label in rows)


def test_test_set_is_a_quarter_of_every_class() -> None:
    data = load_digits()
    train = torch.bincount(data.train.labels)
    test = torch.bincount(data.test.labels)
    assert ((test / (train + test) - 0.25).abs() < 0.005).all()


def test_parts_are_disjoint_and_complete() -> None:
    numbered = Split(torch.arange(60.0).reshape(60, 1, 1, 1), torch.arange(60) % 3)
    rest, held_out = stratified_split(numbered, 0.25, seed=0)
    values = torch.cat([rest.images, held_out.images]).flatten()
    assert sorted(values.tolist()) == list(range(60))
    assert len(held_out) == 15


def test_splits_depend_only_on_their_seed() -> None:
    first = load_digits()
    torch.manual_seed(1234)
    second = load_digits()
    assert torch.equal(first.test.images, second.test.images)
    assert torch.equal(first.train.labels, second.train.labels)
    other = stratified_split(first.train, 0.25, seed=1)[1]
    assert fingerprints(other) != fingerprints(stratified_split(first.train, 0.25, seed=2)[1])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_share_must_be_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match="must be in \\(0, 1\\)"):
        stratified_split(load_digits().train, share, seed=0)


def test_a_split_needs_one_label_per_image() -> None:
    with pytest.raises(ValueError, match="one label per image"):
        Split(torch.zeros(3, 1, 2, 2), torch.zeros(2, dtype=torch.long))
