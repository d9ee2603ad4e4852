"""Sources, selections and subsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equilibria.data import Selection, Source, Split, stratified_split
from equilibria.data.source import choose_samples


class Squares:
    """Source that is not in memory, with unknown labels."""

    def __len__(self) -> int:
        return 12

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return (indices.float() / 12).view(-1, 1, 1, 1), indices**2


def test_fetch_converts_bytes_to_floats_in_0_to_1() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).view(64, 1, 2, 2)
    split = Split(pixels, torch.zeros(64, dtype=torch.uint8))
    images, labels = split.fetch(torch.arange(64))
    assert images.dtype == torch.float32
    assert labels.dtype == torch.long
    assert torch.equal(images.flatten() * 255, torch.arange(256.0))
    assert split.images.dtype == torch.uint8


def test_fetch_does_not_change_floats() -> None:
    split = Split(torch.rand(5, 1, 2, 2), torch.arange(5))
    images, labels = split.fetch(torch.tensor([4, 0]))
    assert torch.equal(images, split.images[[4, 0]])
    assert labels.tolist() == [4, 0]


def test_labels_can_be_maps() -> None:
    split = Split(torch.rand(3, 1, 2, 2), torch.randint(0, 9, (3, 2, 2)))
    assert split.fetch(torch.tensor([1]))[1].shape == (1, 2, 2)


def test_selections_can_be_nested() -> None:
    source: Source = Selection(Squares(), torch.tensor([3, 5, 7]))
    inner = Selection(source, torch.tensor([2, 0]))
    assert len(inner) == 2
    assert inner.fetch(torch.tensor([0, 1]))[1].tolist() == [49, 9]
    assert inner.labels is None


@pytest.mark.parametrize("samples", [1, 4, 9, 10, 23, 60])
def test_chosen_samples_are_balanced(samples: int) -> None:
    labels = torch.arange(60) % 5
    chosen = choose_samples(Split(torch.zeros(60, 1, 1, 1), labels), samples, seed=0)
    counts = torch.bincount(labels[chosen], minlength=5)
    assert len(set(chosen.tolist())) == samples
    assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(chosen, chosen.sort().values)


def test_all_samples_of_rare_classes_are_chosen() -> None:
    labels = torch.tensor([0] * 20 + [7] * 2 + [3] * 20)
    chosen = choose_samples(Split(torch.zeros(42, 1, 1, 1), labels), 22, seed=1)
    assert torch.bincount(labels[chosen])[[0, 7, 3]].tolist() == [10, 2, 10]


def test_the_choice_depends_only_on_the_seed() -> None:
    split = Split(torch.zeros(60, 1, 1, 1), torch.arange(60) % 5)
    first = choose_samples(split, 20, seed=3)
    torch.manual_seed(99)
    assert torch.equal(first, choose_samples(split, 20, seed=3))
    assert not torch.equal(first, choose_samples(split, 20, seed=4))


def test_samples_without_labels_are_chosen_at_random() -> None:
    chosen = choose_samples(Squares(), 5, seed=0)
    assert len(set(chosen.tolist())) == 5


@pytest.mark.parametrize("samples", [0, -1, 13])
def test_the_number_of_samples_must_be_valid(samples: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 12"):
        choose_samples(Squares(), samples, seed=0)


def test_any_source_can_be_split() -> None:
    rest, held_out = stratified_split(Squares(), 0.25, seed=0)
    assert (len(rest), len(held_out)) == (9, 3)
    values = [source.fetch(torch.arange(len(source)))[1] for source in (rest, held_out)]
    assert sorted(torch.cat(values).tolist()) == [number**2 for number in range(12)]
