"""Episodes taken apart: what is learned from, and what is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EpisodeBatch:
    """B episodes: `support` images with their labels, then `query` images with theirs."""

    support: Tensor
    """(B, ways · shots, C, H, W)"""
    support_labels: Tensor
    """(B, ways · shots)"""
    query: Tensor
    query_labels: Tensor
    ways: int
    shots: int

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> EpisodeBatch:
        """Episodes as a data set of episodes gives them (`Episodes`).

        The labels say how many shots there are: those of the support are 0 … 0 1 … 1 and so on,
        `shots` times each, and those of the queries begin with 0 again.
        """
        if inputs.dim() != 5 or targets.shape != inputs.shape[:2] or not len(targets):
            raise ValueError(
                "expected episodes, images (episodes, samples, channels, height, width) and labels "
                f"(episodes, samples), not {tuple(inputs.shape)} and {tuple(targets.shape)}: "
                "few-shot tasks need a data set of episodes, such as omniglot-episodes"
            )
        ways = int(targets.max()) + 1
        shots = int((targets[0] != 0).int().argmax())
        size = ways * shots
        expected = torch.arange(ways, device=targets.device).repeat_interleave(shots)
        if shots < 1 or size >= targets.shape[1] or not bool((targets[:, :size] == expected).all()):
            raise ValueError(
                "the labels of an episode are 0 … 0 1 … 1 and so on for what is learned from, as "
                "often each as there are shots, then those of the queries; here they begin with "
                f"{targets[0, : max(size, 1) + 1].tolist()}"
            )
        return cls(
            support=inputs[:, :size],
            support_labels=targets[:, :size],
            query=inputs[:, size:],
            query_labels=targets[:, size:],
            ways=ways,
            shots=shots,
        )

    def __len__(self) -> int:
        return len(self.support)

    def groups(self, part: Tensor) -> Tensor:
        """The episode of every image of a part, laid end to end."""
        count, size = part.shape[:2]
        return torch.arange(count, device=part.device).repeat_interleave(size)

    def require_ways(self, classes: int) -> None:
        """An error where a model has logits for another number of classes."""
        if classes != self.ways:
            raise ValueError(
                f"the model has {classes} classes, but the episodes {self.ways} ways: give it "
                f"num_classes={self.ways}"
            )
