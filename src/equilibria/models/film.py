"""Feature-wise linear modulation (FiLM) by a task vector.

Perez et al., "FiLM: Visual Reasoning with a General Conditioning Layer", AAAI 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equilibria.context import Context, State, unflatten_state
from equilibria.models.mdeq import MDEQCell
from equilibria.models.mdeq_layers import CellNorm, Reading


def modulate(features: Tensor, film: Tensor) -> Tensor:
    """(1 + γ) ⊙ features + β; `film` has γ and β side by side, a number a channel each."""
    gamma, beta = film[:, :, None, None].chunk(2, dim=1)
    return torch.addcmul(features + beta, features, gamma)


class CopiesFiLM(nn.Module):
    """The injection of a cell that knows no tasks: copies of the features, each modulated.

    The task vector is γ, orthogonally mixed, to begin with; β starts at 0.
    """

    def __init__(self, task_size: int, channels: int, *, copies: int) -> None:
        super().__init__()
        self.copies = copies
        self.film = nn.Linear(task_size, 2 * copies * channels)
        with torch.no_grad():
            gamma, beta = self.film.weight.chunk(2)
            nn.init.orthogonal_(gamma)
            beta.zero_()
            self.film.bias.zero_()

    def forward(self, features: Tensor, tasks: Tensor) -> Tensor:
        return modulate(features.repeat(1, self.copies, 1, 1), self.film(tasks))


class PackedFiLM(nn.Module):
    """The injection of a `FiLMCell`: the features, and behind them γ and β of its blocks.

    A cell takes one tensor: the numbers fill further channels, pixel by pixel.
    """

    def __init__(self, task_size: int, count: int) -> None:
        super().__init__()
        self.film = nn.Linear(task_size, count)

    def forward(self, features: Tensor, tasks: Tensor) -> Tensor:
        film = self.film(tasks)
        batch, _, height, width = features.shape
        further = -(-film.shape[1] // (height * width))
        padded = F.pad(film, (0, further * height * width - film.shape[1]))
        return torch.cat([features, padded.reshape(batch, further, height, width)], dim=1)


@dataclass
class FilmedReading(Reading):
    """What the layers of a `FiLMCell` read in one step."""

    film: tuple[Tensor, ...] = ()
    """γ and β of each branch."""


class FilmedNorm(nn.Module):
    """A norm and the modulation of its branch."""

    def __init__(self, norm: CellNorm, branch: int) -> None:
        super().__init__()
        self.norm = norm
        self.branch = branch

    def forward(self, z: Tensor, reading: FilmedReading) -> Tensor:
        return modulate(self.norm(z, reading), reading.film[self.branch])


class FiLMCell(MDEQCell):
    """MDEQ's cell with FiLM on top of the first norm of every residual block (JIIO, C.2).

    Its input is that of `PackedFiLM`. All norms are group norms, so that no sample sees another.
    """

    def __init__(
        self, channels: int | Sequence[int], *, expansion: int = 5, **options: Any
    ) -> None:
        super().__init__(channels, expansion=expansion, norm="group", **options)
        self.sizes = [2 * expansion * width for width in self.channels]
        for branch, block in enumerate(self.blocks):
            block.inner_norm = FilmedNorm(block.inner_norm, branch)  # type: ignore[arg-type]

    @property
    def film_size(self) -> int:
        """How many numbers modulate a sample."""
        return sum(self.sizes)

    def inject(self, x: Tensor) -> Context:
        width = self.channels[0]
        film = x[:, width:].flatten(1)
        if film.shape[1] < self.film_size:
            raise ValueError(
                f"the input of a FiLMCell has {width} channels of features and {self.film_size} "
                f"numbers of FiLM behind them, not {film.shape[1]}: make it with PackedFiLM"
            )
        pieces = torch.split(film[:, : self.film_size], self.sizes, dim=1)
        return super().inject(x[:, :width]).with_sample(film=pieces)

    def step(self, state: State, context: Context) -> State:
        film = context.sample["film"]
        assert isinstance(film, tuple)
        reading = FilmedReading(**vars(Reading.of(context)), film=film)
        return unflatten_state(state, self._map(state, context, reading))
