"""Batches whose samples stay for several steps, with the states of their solves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from equilibria.context import State
from equilibria.context.state import map_state, state_tensors
from equilibria.equilibrium import EquilibriumLayer
from equilibria.equilibrium.solving import Equilibrium, solving_of
from equilibria.tasks import Outcome

Batch = tuple[Tensor, Tensor, Tensor]


class CarriedBatches:
    """Batches in which a sample stays until its output is right, or for `segments` steps.

    The state of each sample is carried from step to step. A new sample starts at random if the
    layer has random starts, and otherwise at zero, except in the first step.

    Args:
        segments: Largest number of steps per sample.
        layers: Layers whose states are carried.
    """

    def __init__(self, segments: int, layers: Sequence[EquilibriumLayer]) -> None:
        self.segments = segments
        self.states: dict[EquilibriumLayer, State | None] = dict.fromkeys(layers)
        self.finished: Tensor | None = None
        """Which samples of the last batch are to be replaced."""
        self._ages = torch.zeros(0, dtype=torch.long)

    def batches(self, stream: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Yield `count` batches; call `keep` after each.

        Args:
            stream: At least one batch of new samples per batch.
            count: Number of batches.
        """
        current = waiting = next(stream)
        waiting = _rows(current, slice(0, 0))
        self._ages = torch.zeros(len(current[0]), dtype=torch.long)
        self.states = dict.fromkeys(self.states)
        yield current
        for _ in range(count - 1):
            places = self._places()
            while len(waiting[0]) < len(places):
                waiting = _joined(waiting, next(stream))
            new, waiting = (
                _rows(waiting, slice(0, len(places))),
                _rows(waiting, slice(len(places), None)),
            )
            current = _replaced(current, places, new)
            self._restart(places)
            yield current

    def keep(self, equilibria: Sequence[Equilibrium], outcome: Outcome) -> None:
        """Store the states after a step, and which samples are finished.

        Args:
            equilibria: Equilibria of the step; the last one of each layer counts.
            outcome: Outcome of the step.
        """
        for equilibrium in equilibria:
            state = map_state(lambda tensor: tensor.detach(), equilibrium.state)
            if len(state_tensors(state)[0]) != len(self._ages):
                raise ValueError(
                    "training.segments needs one equilibrium per sample, but the model solves for "
                    f"{len(state_tensors(state)[0])} with {len(self._ages)} samples: set it to 1"
                )
            self.states[equilibrium.layer] = state
        self._ages += 1
        finished = self._ages >= self.segments
        correct = outcome.values.get("correct")
        if correct is not None:
            total = outcome.values.get("weight", torch.ones_like(correct))
            finished |= (correct >= total).cpu()
        self.finished = finished

    def _places(self) -> Tensor:
        assert self.finished is not None
        return self.finished.nonzero().squeeze(1)

    def _restart(self, places: Tensor) -> None:
        """Give the samples at some places a new start."""
        self._ages[places] = 0
        for layer, state in self.states.items():
            if state is None or not len(places):
                continue
            random = solving_of(layer).random_start
            rows = map_state(lambda tensor: tensor[places], state)
            if random is None:
                new = map_state(torch.zeros_like, rows)
            else:
                new = random.draw(rows, training=True)
            self.states[layer] = map_state(
                lambda tensor, fresh: tensor.index_copy(0, places.to(tensor.device), fresh),
                state,
                new,
            )


def _rows(batch: Batch, rows: slice) -> Batch:
    return batch[0][rows], batch[1][rows], batch[2][rows]


def _joined(first: Batch, second: Batch) -> Batch:
    pairs = zip(first, second, strict=True)
    indices, images, targets = (torch.cat(pair) for pair in pairs)
    return indices, images, targets


def _replaced(batch: Batch, places: Tensor, new: Batch) -> Batch:
    indices, images, targets = (
        tensor.index_copy(0, places.to(tensor.device), rows)
        for tensor, rows in zip(batch, new, strict=True)
    )
    return indices, images, targets
