"""Batches: every sample once, in an order that follows the seed."""

from __future__ import annotations

import pytest
import torch

from equilibria.data import Batches, Split


@pytest.fixture
def split() -> Split:
    return Split(torch.arange(10.0).reshape(10, 1, 1, 1), torch.arange(10))


def order(batches: Batches) -> list[int]:
    return torch.cat([labels for _, labels in batches]).tolist()


def shuffled(split: Split, seed: int) -> Batches:
    return Batches(split, 4, shuffle=torch.Generator().manual_seed(seed))


def test_every_sample_once(split: Split) -> None:
    batches = shuffled(split, 0)
    assert sorted(order(batches)) == list(range(10))
    assert len(batches) == len(list(batches)) == 3


def test_images_stay_with_their_labels(split: Split) -> None:
    for images, labels in shuffled(split, 0):
        assert torch.equal(images.flatten(), labels.float())


def test_order_is_new_each_time_and_follows_the_seed(split: Split) -> None:
    first, second = shuffled(split, 0), shuffled(split, 0)
    once, again = order(first), order(first)
    assert once != again
    assert [once, again] == [order(second), order(second)]
    assert once != order(shuffled(split, 1))


def test_without_shuffling_the_order_is_kept(split: Split) -> None:
    assert order(Batches(split, 3)) == list(range(10))


def test_size_must_be_positive(split: Split) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Batches(split, 0)
