"""Batches: every sample once, in an order that follows the seed."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

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


def test_a_short_last_batch_can_be_dropped(split: Split) -> None:
    batches = Batches(split, 4, drop_last=True)
    assert len(batches) == 2
    assert [len(labels) for _, labels in batches] == [4, 4]
    assert len(Batches(split, 5, drop_last=True)) == 2
    assert list(Batches(split, 11, drop_last=True)) == []


@pytest.mark.parametrize("prefetch", [1, 2, 50])
def test_reading_ahead_changes_nothing(split: Split, prefetch: int) -> None:
    """Nor does it draw from the generator while somebody else does."""

    def run(ahead: int) -> list[float]:
        chance = torch.Generator().manual_seed(5)
        seen: list[float] = []
        for _ in range(2):
            for images, labels in Batches(split, 3, shuffle=chance, prefetch=ahead):
                noise = torch.randn(images.shape, generator=chance)
                seen += [*(images + noise).flatten().tolist(), *labels.tolist()]
        return seen

    assert run(prefetch) == run(0)


class Watched:
    """A source that knows how often it was read, and fails at one sample."""

    def __init__(self, samples: int, bad: int = -1, seconds: float = 0) -> None:
        self.samples = samples
        self.seconds = seconds
        self.bad = bad
        self.reads: list[str] = []
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        with self.lock:
            self.reads.append(threading.current_thread().name)
        time.sleep(self.seconds)
        if self.bad in indices.tolist():
            raise OSError(f"sample {self.bad} cannot be read")
        return indices.float().view(-1, 1, 1, 1), indices


def test_batches_are_read_by_another_thread() -> None:
    source = Watched(6)
    assert order(Batches(source, 2, prefetch=2)) == list(range(6))
    assert len(source.reads) == 3
    assert threading.current_thread().name not in source.reads


def test_what_fails_ahead_fails_at_its_batch() -> None:
    batches = iter(Batches(Watched(6, bad=3), 2, prefetch=2))
    assert next(batches)[1].tolist() == [0, 1]
    with pytest.raises(OSError, match="sample 3"):
        next(batches)


def test_leaving_early_stops_the_reading() -> None:
    source = Watched(100, seconds=0.05)
    batches = iter(Batches(source, 1, prefetch=100))
    next(batches)
    batches.close()
    assert len(source.reads) < 100
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("equilibria-prefetch") for name in names)


def test_nothing_gives_no_batch() -> None:
    empty = Split(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long))
    assert list(Batches(empty, 4)) == []
    assert list(Batches(empty, 4, prefetch=2)) == []


def test_prefetch_must_not_be_negative(split: Split) -> None:
    with pytest.raises(ValueError, match="prefetch must not be negative"):
        Batches(split, 2, prefetch=-1)
