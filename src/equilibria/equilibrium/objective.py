"""Hidden objectives G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x), which equilibria minimize."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.state import map_state, state_tensors, sum_per_sample
from equilibria.energies import Energy


class NoObjectiveError(TypeError):
    """The equilibrium of this cell is not known to minimize an objective."""


class Objective(ABC):
    """Hidden objective at a given input, evaluated per sample.

    It is a function of the state that the equilibrium minimizes (see `is_minimized` for what holds
    if it is not convex). Evaluate it at values T(y) of the map, such as the states that solvers
    return. Points between two such values may be outside the domain, where it is infinite.

    Examples:
        >>> layer, x = eq.EquilibriumLayer(eq.Input(torch.eye(2))), torch.ones(1, 2)
        >>> y = layer(x).detach()
        >>> layer.objective(x).value(y).item(), layer.objective(x).residual(y).item()
        (-1.0, 0.0)
    """

    @property
    def is_minimized(self) -> bool:
        """Whether the equilibrium is a stationary point of `value`, and its minimizer if convex.

        Otherwise the equilibrium solves at most a related inclusion.
        """
        return True

    @abstractmethod
    def value(self, state: State) -> Tensor:
        """Return the objective of each sample, shape (B,)."""

    @abstractmethod
    def gradient(self, state: State) -> State:
        """Return the subgradient of minimal norm, which is zero exactly at stationary points."""

    @abstractmethod
    def residual(self, state: State) -> Tensor:
        """Return the residual ‖y − T(y)‖ of each sample, shape (B,)."""


class EnergyObjective(Objective):
    """Hidden objective of the map y ↦ σ(−∇E(y; x)) of an energy E and an activation σ.

    It is G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x), where f is the function with σ = prox_f.

    Args:
        energy: The energy E.
        activation: The activation σ.
        context: Tensors that the energy reads besides the state; they depend on the input x.
        scale: Factor of value and gradient: 1/μ for OptEq, whose objective is φ = G/μ (Theorem 1).
        relaxed: Whether states come from the relaxed map αT + (1−α)I of a map T, whose values may
            be slightly outside the domain of f. Value and gradient are then evaluated at T(y).

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
    """Return the distance ‖a − b‖ of two states for each sample."""
    squares = [
        sum_per_sample((p - q).square())
        for p, q in zip(state_tensors(a), state_tensors(b), strict=True)
    ]
    return torch.stack(squares).sum(dim=0).sqrt()
