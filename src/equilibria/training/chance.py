"""Where the chance in a training run comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Chance:
    """Seeds for every epoch and every process, from the one seed of a run.

    An epoch draws nothing that depends on the epochs before it: a run that goes on from a
    checkpoint needs no state of any generator.
    """

    seed: int
    rank: int = 0

    def order(self, epoch: int) -> torch.Generator:
        """For the order of samples, which all processes share."""
        return torch.Generator().manual_seed(_mix(self.seed, epoch, 0, 0))

    def augmentation(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(_mix(self.seed, epoch, self.rank, 1))

    @contextmanager
    def of_torch(self, epoch: int, device: torch.device) -> Iterator[None]:
        """Torch's own generators, which dropout draws from; afterwards they are as before."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_mix(self.seed, epoch, self.rank, 2))
            yield


def _mix(*numbers: int) -> int:
    """A seed in which runs, epochs, processes and purposes have nothing in common."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
