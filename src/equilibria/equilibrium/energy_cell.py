"""Cells defined by an energy."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from equilibria.activations import Activation, IdentityActivation, ReLU, get_activation
from equilibria.context import Context, State
from equilibria.context.state import Layout, Packing, map_state
from equilibria.energies import Energy
from equilibria.energies.capabilities import calibrate, first_descent, refresh, rounding
from equilibria.energies.rounding import Rounding
from equilibria.equilibrium.bounds import StepBounds
from equilibria.equilibrium.capabilities import EnergyForm
from equilibria.equilibrium.cell import Cell
from equilibria.equilibrium.objective import EnergyObjective, NoObjectiveError, Objective
from equilibria.gradients import Symmetry
from equilibria.gradients.base import Linearization
from equilibria.registry import check_share
from equilibria.solvers.problem import Potential

N = TypeVar("N", float, Tensor)


class EnergyCell(Cell):
    """Cell of an energy E(y; x) and an activation σ, with the map y ↦ σ(−∇E(y; x)).

    Its equilibrium is a stationary point of the hidden objective G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y;
    x), where f is the function with σ = prox_f.

    Args:
        energy: E, an energy term or a sum of terms.
        activation: σ, by name or as an object.
        alpha: α in (0, 1]. With α < 1 the step is relaxed, y ← α σ(−∇E(y; x)) + (1 − α) y, with the
            same equilibrium (the skip connection of OptEq's Table 1).
        damping: s in (0, 1]. With s < 1 the step is the proximal gradient step
            y ← prox_{sf}((1−s) y − s∇E(y; x)), which for s ≤ 1/(1 + ‖∇²E‖) decreases G in every
            step, even if the plain step does not contract. Requires prox_{sf} = prox_f, as for relu
            and identity.

    Raises:
        ValueError: If `damping` < 1 and the activation is neither relu nor identity.

    Examples:
        >>> cell = eq.EnergyCell(eq.Input(torch.eye(2)), activation="tanh")
        >>> context = cell.inject(torch.ones(1, 2))
        >>> cell.step(torch.zeros(1, 2), context)
        tensor([[0.7616, 0.7616]], grad_fn=...)
    """

    symmetry = Symmetry.WEIGHTED

    def __init__(
        self,
        energy: Energy,
        activation: str | Activation = "relu",
        alpha: float = 1.0,
        damping: float = 1.0,
    ) -> None:
        super().__init__()
        check_share(alpha=alpha, damping=damping)
        self.energy = energy
        self.activation = get_activation(activation)
        if damping < 1 and not isinstance(self.activation, ReLU | IdentityActivation):
            raise ValueError(
                "damping < 1 needs the activation relu or identity, whose penalty does not depend "
                f"on the step size, got {self.activation!r}; use alpha < 1, which relaxes any map"
            )
        self.alpha = alpha
        self.damping = damping
        self.couples_batch = energy.facts.couples_batch

    @property
    def monotone(self) -> bool:
        """Whether the map is monotone because the energy is concave."""
        return self.energy.facts.is_concave

    @property
    def refresh_until(self) -> int:
        """Number of first iterations of a solve in which `refresh` still changes the map."""
        return self.energy.facts.refresh_until

    @property
    def formula(self) -> str | None:
        """Hidden objective of the cell as text; None if the energy declares no gradient."""
        if not self.energy.facts.has_gradient:
            return None
        return f"G(y) = 1ᵀf(y) + ½‖y‖² + {self.energy.formula}".replace("+ −", "− ")

    def inject(self, *inputs: Tensor) -> Context:
        context = self.energy.inject(*inputs)
        start = self.initial_state(*inputs, context)
        context = self.energy.complete(context, Packing.of(start).layout)
        if not self.energy.facts.calibrates:
            return context
        descent = first_descent(self.energy, context)
        if descent is None:
            descent = self.energy.descent(start, context)
        return calibrate(self.energy, map_state(self.activation, descent), context)

    def refresh(self, state: State, context: Context) -> Context:
        """Recompute what the energy's terms read besides the state and depends on the iterates.

        Args:
            state: Current iterate.
            context: Tensors that the terms read until now.
        """
        return refresh(self.energy, state, context)

    def initial_state(self, x: Tensor, *others_and_context: Any) -> State:
        start = self.energy.initial_state(others_and_context[-1])
        return torch.zeros_like(x) if start is None else start

    def first_image(self, context: Context) -> State | None:
        """Return T(0), the map at the zero state, if it costs nothing, otherwise None.

        For OptEq it is σ(Ux + b).
        """
        descent = first_descent(self.energy, context)
        return None if descent is None else map_state(self.activation, descent)

    def step(self, state: State, context: Context) -> State:
        direction = self._direction(state, context)
        if self.alpha == 1 and self.energy.facts.owns_descent and not torch.is_grad_enabled():
            return map_state(self.activation.overwrite, direction)
        return self._relax(state, direction)

    def symmetry_weight(self, state: State, context: Context) -> State:
        """Return the activation's slope σ′ at the pre-activation −∇E(y; x) of a state y."""
        return map_state(self.activation.derivative, self._direction(state, context))

    def linearize(self, state: State, context: Context) -> Linearization:
        """Evaluate the map once, and keep what its derivative needs."""
        direction = self._direction(state, context)
        with torch.no_grad():
            weight = map_state(self.activation.derivative, direction)
        return Linearization(self._relax(state, direction), weight, direction)

    def _direction(self, state: State, context: Context) -> State:
        """Return the argument of the activation, (1−s) y − s∇E(y; x)."""
        descent = self.energy.descent(state, context)
        if self.damping == 1:
            return descent
        return map_state(lambda y, d: y + self.damping * (d - y), state, descent)

    def _relax(self, state: State, direction: State) -> State:
        image = map_state(self.activation, direction)
        if self.alpha == 1:
            return image
        return map_state(lambda y, mapped: y + self.alpha * (mapped - y), state, image)

    @property
    def limits(self) -> StepBounds[float]:
        return StepBounds(self._contraction(self.energy.limits.curvature))

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        energy = self.energy.bounds(context, layout)
        factor = self.alpha * self.activation.lipschitz * self.damping
        return StepBounds(
            lambda: self._contraction(energy.curvature),
            lambda: None if energy.input is None else energy.input * factor,
        )

    def _contraction(self, curvature: N | None) -> N | None:
        """Return the Lipschitz constant of the relaxed and damped step, given that of ∇E."""
        if curvature is None:
            return None
        damped: Any = 1 - self.damping + self.damping * curvature
        relaxed: N = 1 - self.alpha + self.alpha * self.activation.lipschitz * damped
        return relaxed

    def rounding(
        self, exact: Cell, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Bound the rounding error of a step: of ∇E, the activation and the relaxation."""
        assert isinstance(exact, EnergyCell)
        gradient_error = rounding(self.energy, exact.energy, context, layout, unit)
        is_exact = isinstance(self.activation, ReLU | IdentityActivation)
        if gradient_error is None or (is_exact and self.alpha == self.damping == 1):
            return gradient_error
        curvature = exact.energy.bounds(context, layout).curvature
        if curvature is None or not self.energy.facts.is_quadratic:
            return None
        steepness = max(1.0, self.activation.lipschitz)
        sizes = Rounding(state=2 + float(curvature.max()), injected=1.0)
        return gradient_error * steepness + sizes * (16 * unit * steepness)

    def energy_form(self, state: State, context: Context) -> EnergyForm | None:
        """Return the hidden objective and σ(−∇E(y; x)); None if the energy declares no gradient.

        Args:
            state: The state y.
            context: Tensors that the energy reads besides the state; they depend on the input x.
        """
        if not self.energy.facts.has_gradient:
            return None
        image = map_state(self.activation, self.energy.descent(state, context))
        return EnergyForm(self, context, image)

    @property
    def potential(self) -> Potential | None:
        """Hidden objective of the cell for `Descent`; None if the energy declares no gradient."""
        if not self.energy.facts.has_gradient:
            return None
        return Potential(
            self.energy, self.activation, self.alpha, self.damping, is_convex=self._is_convex
        )

    @property
    def _is_convex(self) -> bool:
        """Whether G is known to be convex, from ∇²(1ᵀf + ½‖y‖²) ≥ 1/L_σ and −∇²E ≤ concavity."""
        concavity = self.energy.limits.concavity
        if concavity is None:
            limit = self.limits.contraction  # a subclass may have better limits than its energy
            return limit is not None and limit <= 1
        return concavity * self.activation.lipschitz <= 1

    def objective(self, context: Context) -> Objective:
        if not self.energy.facts.has_gradient:
            raise NoObjectiveError(
                f"{type(self).__name__} has no hidden objective, because a scale of its energy "
                "follows the state (gamma='paper'); gamma='running' has an objective"
            )
        return EnergyObjective(self.energy, self.activation, context, relaxed=self.alpha < 1)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, alpha={self.alpha}, damping={self.damping}"
