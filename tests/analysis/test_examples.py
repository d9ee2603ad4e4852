"""Choice of example images."""

from __future__ import annotations

import torch

from equilibria.analysis.examples import choose_examples


def test_examples_are_mistakes_followed_by_all_classes_in_turn() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 0, 1])
    predictions = torch.tensor([0, 0, 1, 1, 1, 1, 0])

    def chosen(**limits: int) -> list[int]:
        return choose_examples(labels, predictions, **limits).tolist()

    assert chosen(count=6, mistakes=2) == [2, 5, 0, 3, 1, 4]
    assert chosen(count=4, mistakes=6) == [2, 5, 6, 0]
    assert chosen() == [2, 5, 6, 0, 3, 1, 4]
