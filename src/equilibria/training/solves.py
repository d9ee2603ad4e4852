"""How the equilibrium layers of a model solve while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equilibria.context import State, state_tensors
from equilibria.equilibrium import (
    EquilibriumLayer,
    Record,
    jacobian_penalty,
    random_iterate,
    solving,
)
from equilibria.training.settings import TrainingSettings

ITERATES = 12
"""How far a random iterate may have gone at which the Jacobian is penalized."""


class TrainingSolves:
    """Starts and Jacobian terms of a model's layers, as settings say."""

    def __init__(self, model: nn.Module, settings: TrainingSettings, samples: int) -> None:
        self.model = model
        self.settings = settings
        layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        self.starts = {layer: _Starts(samples) for layer in layers} if settings.warm_start else {}

    def state(self) -> list[list[Tensor]]:
        """Where warm solves start, for a checkpoint."""
        return [[starts.known, *starts.tensors] for starts in self.starts.values()]

    def load_state(self, state: list[list[Tensor]]) -> None:
        for starts, (known, *tensors) in zip(self.starts.values(), state, strict=True):
            starts.known, starts.tensors = known, tensors

    @contextmanager
    def batch(self, indices: Tensor) -> Iterator[Record]:
        """Around the forward pass of the samples of these indices."""
        starts = {layer: starts.of(indices) for layer, starts in self.starts.items()}
        listens = bool(self.starts) or self.settings.jacobian_weight > 0
        with solving(
            self.model,
            start=starts if self.starts else None,
            record="equilibria" if listens else True,
        ) as record:
            yield record
        for found in record.equilibria if self.starts else ():
            self.starts[found.layer].keep(indices, found.state)

    def jacobian_term(self, record: Record, generator: torch.Generator) -> Tensor | None:
        """What the Jacobians of a batch add to the loss; None where nothing was asked for."""
        settings = self.settings
        penalties = []
        for found in record.equilibria if settings.jacobian_weight else ():
            if not len(found.inputs[0]):
                continue
            state, context = found.state, found.context
            if settings.jacobian_at == "iterate":
                state, context = random_iterate(
                    found.layer.cell, *found.inputs, max_iterations=ITERATES, generator=generator
                )
            penalty = jacobian_penalty(
                found.layer.cell,
                state,
                context,
                vectors=settings.jacobian_vectors,
                generator=generator,
            )
            penalties.append(penalty.mean())
        return settings.jacobian_weight * torch.stack(penalties).sum() if penalties else None


class _Starts:
    """The last equilibrium of every sample, as one layer left it."""

    def __init__(self, samples: int) -> None:
        self.known = torch.zeros(samples, dtype=torch.bool)
        self.tensors: list[Tensor] = []

    def of(self, indices: Tensor) -> State | None:
        """None where no sample was met before: the cell knows a better start than zero."""
        if not self.known[indices].any():
            return None
        return tuple(tensor[indices] for tensor in self.tensors)

    def keep(self, indices: Tensor, state: State) -> None:
        found = [tensor.detach().cpu() for tensor in state_tensors(state)]
        if len(found[0]) != len(indices):
            raise ValueError(
                f"training.warm_start keeps one equilibrium a sample, but the model solved for "
                f"{len(found[0])} with {len(indices)} samples, as it does for episodes: turn it off"
            )
        if not self.tensors:
            self.tensors = [
                tensor.new_zeros(len(self.known), *tensor.shape[1:]) for tensor in found
            ]
        for kept, tensor in zip(self.tensors, found, strict=True):
            kept[indices] = tensor
        self.known[indices] = True
