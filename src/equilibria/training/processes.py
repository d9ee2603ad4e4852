"""The processes that train one model together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Processes:
    """One process that trains alone; `distributed.ProcessGroup` is several that train together.

    Each takes its share of every batch. What is a sum over the batch becomes the sum over all of
    them by `total`, gradients by `sum_gradients`.
    """

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the processes, without gradients."""
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradient of each parameter by its sum over the processes."""


ALONE = Processes()
