"""The hidden objective G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x) whose minimizer a network outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.state import map_state, state_tensors, sum_per_sample
from equilibria.energies import Energy


class NoObjectiveError(TypeError):
    """The equilibrium of this cell is not known to minimize anything."""


class Objective(ABC):
    """A hidden objective at a given input, evaluated per sample.

    Evaluate it at outputs of the map, which is what solvers return: a point between two outputs may
    lie outside the domain, where the value is infinite.

    Examples:
        >>> layer, x = eq.EquilibriumLayer(eq.Input(torch.eye(2))), torch.ones(1, 2)
        >>> y = layer(x).detach()
        >>> layer.objective(x).value(y).item(), layer.objective(x).residual(y).item()
        (-1.0, 0.0)
    """

    @property
    def is_minimized(self) -> bool:
        """Whether the equilibrium is stationary for `value`: its minimizer where that is convex.

        Otherwise it solves a related inclusion, or nothing of the kind.
        """
        return True

    @abstractmethod
    def value(self, state: State) -> Tensor:
        """The objective of each sample, shape `(batch,)`."""

    @abstractmethod
    def gradient(self, state: State) -> State:
        """The subgradient of least norm; zero exactly at a stationary point."""

    @abstractmethod
    def residual(self, state: State) -> Tensor:
        """How far each sample is from stationary, ‖y − T(y)‖, shape `(batch,)`."""


class EnergyObjective(Objective):
    """The objective of the map y = σ(−∇E(y; x)), σ = prox_f.

    scale: multiplies value and gradient: OptEq with μ ≠ 1 has φ = G/μ (Theorem 1).
    relaxed: the states come from the relaxed map αT + (1−α)I, whose outputs may leave the domain of
        f by a little of what the solver mixed in. Value and gradient are then those at T(y).

    Examples:
        >>> layer, x = eq.EquilibriumLayer(eq.Input(torch.eye(2))), torch.ones(1, 2)
        >>> from equilibria.equilibrium.objective import EnergyObjective
        >>> isinstance(layer.objective(x), EnergyObjective)
        True
    """

    def __init__(
        self,
        energy: Energy,
        activation: Activation,
        context: Context,
        *,
        scale: float = 1.0,
        relaxed: bool = False,
    ) -> None:
        self.energy = energy
        self.activation = activation
        self.context = context
        self.scale = scale
        self.relaxed = relaxed

    def value(self, state: State) -> Tensor:
        state = self._in_domain(state)
        energy = self.energy.value(state, self.context)
        separable = [sum_per_sample(self.activation.conjugate(y)) for y in state_tensors(state)]
        total = torch.stack(separable).sum(dim=0)
        if self.energy.facts.couples_batch:
            total = total.sum()
        return self.scale * (total + energy)

    def gradient(self, state: State) -> State:
        state = self._in_domain(state)
        descent = self.energy.descent(state, self.context)
        return map_state(
            lambda y, d: self.scale * self.activation.minimal_subgradient(y, y - d), state, descent
        )

    def residual(self, state: State) -> Tensor:
        return distance_per_sample(state, self._image(state))

    def _in_domain(self, state: State) -> State:
        return self._image(state) if self.relaxed else state

    def _image(self, state: State) -> State:
        return map_state(self.activation, self.energy.descent(state, self.context))


def distance_per_sample(a: State, b: State) -> Tensor:
    """‖a − b‖ of each sample."""
    squares = [
        sum_per_sample((p - q).square())
        for p, q in zip(state_tensors(a), state_tensors(b), strict=True)
    ]
    return torch.stack(squares).sum(dim=0).sqrt()
