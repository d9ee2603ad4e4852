"""Choice of example images among test images."""

from __future__ import annotations

import torch
from torch import Tensor

EXAMPLES, MISTAKES = 9, 4
"""Number of example images, and of misclassified images among them."""


def choose_examples(
    labels: Tensor, predictions: Tensor, *, count: int = EXAMPLES, mistakes: int = MISTAKES
) -> Tensor:
    """Choose example images: at most `mistakes` errors, then correct ones spread over the classes.

    There are more errors only if there are too few correct predictions.

    Args:
        labels: True classes, shape (B,).
        predictions: Predicted classes, shape (B,).
        count: Number of examples.
        mistakes: Largest number of errors among them.

    Returns:
        Indices of the examples, the errors first.

    Examples:
        >>> labels, predictions = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 0])
        >>> from equilibria.analysis.examples import choose_examples
        >>> choose_examples(labels, predictions, count=3, mistakes=1)
        tensor([2, 0, 1])
    """
    right = predictions == labels
    # The first image of every class, then the second of every class, and so on.
    ranks: dict[int, int] = {}
    keyed = []
    for index in right.nonzero().squeeze(1).tolist():
        label = int(labels[index])
        ranks[label] = ranks.get(label, 0) + 1
        keyed.append((ranks[label], label, index))
    wrong = (~right).nonzero().squeeze(1).tolist()[: max(mistakes, count - len(keyed))]
    chosen = wrong + [index for _, _, index in sorted(keyed)][: count - len(wrong)]
    return torch.tensor(chosen, dtype=torch.int64)
