"""How the equilibrium layers of a model solve while it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from equilibria.context import Context, State, state_tensors
from equilibria.equilibrium import EquilibriumLayer, jacobian_penalty, random_iterate
from equilibria.gradients import get_gradient
from equilibria.training.settings import TrainingSettings

ITERATES = 12
"""How far a random iterate may have gone at which the Jacobian is penalized."""


class TrainingSolves:
    """Tolerances, gradient rule, starts and Jacobian terms of a model's layers, as settings say."""

    def __init__(self, model: nn.Module, settings: TrainingSettings, samples: int) -> None:
        self.settings = settings
        self.layers = [m for m in model.modules() if isinstance(m, EquilibriumLayer)]
        self.own = [layer.solver.tolerance for layer in self.layers]
        self.starts = [_Starts(samples) for _ in self.layers] if settings.warm_start else []
        if settings.gradient is not None:
            for layer in self.layers:
                layer.gradient = get_gradient(settings.gradient)

    def prepare_training(self, epoch: int) -> None:
        self._set_tolerance(self.settings.tolerance_in(epoch))

    def prepare_evaluation(self) -> None:
        self._set_tolerance(self.settings.evaluation_tolerance)

    def state(self) -> list[list[Tensor]]:
        """Where warm solves start, for a checkpoint."""
        return [[starts.known, *starts.tensors] for starts in self.starts]

    def load_state(self, state: list[list[Tensor]]) -> None:
        for starts, (known, *tensors) in zip(self.starts, state, strict=True):
            starts.known, starts.tensors = known, tensors

    def batch(self, indices: Tensor, chance: torch.Generator) -> _BatchOfSolves:
        """Around the forward pass of the samples of these indices."""
        return _BatchOfSolves(self, indices, chance)

    def _set_tolerance(self, tolerance: float | None) -> None:
        for layer, own in zip(self.layers, self.own, strict=True):
            layer.solver = replace(layer.solver, tolerance=own if tolerance is None else tolerance)


class _BatchOfSolves:
    """Gives the layers their starts, and listens for equilibria: to keep, and to penalize."""

    def __init__(self, solves: TrainingSolves, indices: Tensor, chance: torch.Generator) -> None:
        self.solves = solves
        self.indices = indices
        self.chance = chance
        self.penalties: list[Tensor] = []

    def __enter__(self) -> _BatchOfSolves:
        settings = self.solves.settings
        for place, layer in enumerate(self.solves.layers):
            if settings.warm_start:
                layer.start = self.solves.starts[place].of(self.indices)
            if settings.warm_start or settings.jacobian_weight:
                layer.on_equilibrium = self._listener(place, layer)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.solves.layers:
            layer.start = None
            layer.on_equilibrium = None

    def jacobian_term(self) -> Tensor | None:
        """What the Jacobians add to the loss; None where nothing was asked for."""
        if not self.penalties:
            return None
        return self.solves.settings.jacobian_weight * torch.stack(self.penalties).sum()

    def _listener(
        self, place: int, layer: EquilibriumLayer
    ) -> Callable[[Tensor, State, Context], None]:
        settings = self.solves.settings

        def listen(x: Tensor, state: State, context: Context) -> None:
            if settings.warm_start:
                self.solves.starts[place].keep(self.indices, state)
            if settings.jacobian_weight and len(x):
                if settings.jacobian_at == "iterate":
                    state, context = random_iterate(
                        layer.cell, x, max_iterations=ITERATES, generator=self.chance
                    )
                penalty = jacobian_penalty(
                    layer.cell,
                    state,
                    context,
                    vectors=settings.jacobian_vectors,
                    generator=self.chance,
                )
                self.penalties.append(penalty.mean())

        return listen


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


def set_tolerance(model: nn.Module, tolerance: float | None) -> None:
    """Give the solvers of a model this tolerance; None leaves them their own."""
    for layer in model.modules():
        if isinstance(layer, EquilibriumLayer) and tolerance is not None:
            layer.solver = replace(layer.solver, tolerance=tolerance)
