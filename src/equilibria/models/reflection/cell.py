"""The reflection of an equilibrium, a 1-Lipschitz layer (see `model.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies import Input
from equilibria.energies.convex_potential import ConvexPotential
from equilibria.equilibrium import EnergyCell, StepBounds
from equilibria.operators import Identity
from equilibria.operators.compose import OperatorLike


class ReflectionCell(EnergyCell):
    """Reflection 2z − u at z = u − Wᵀσ(Wz + b), the proximal operator of a convex potential.

    The step is z ← z − s∇G(z) with s = 2/(2 + ζ²), ‖W‖ ≤ ζ. The objective G of the proximal
    operator is 1-strongly convex and its gradient is (1 + ζ²)-Lipschitz, so the step is a
    contraction with factor ζ²/(2 + ζ²).

    Args:
        W: Operator of the potential.
        bias: The bias b, or whether there is a trainable one.
        zeta: ζ; by default the bound on ‖W‖ by construction. If there is none, s = 1.

    Examples:
        >>> layer = eq.EquilibriumLayer(cell=eq.models.ReflectionCell(eq.Dense(3, 3), zeta=1.0))
        >>> layer(torch.ones(1, 3)).shape
        torch.Size([1, 3])
    """

    def __init__(
        self, W: OperatorLike, *, bias: bool | Tensor = True, zeta: float | None = None
    ) -> None:
        potential = ConvexPotential(W, bias, "relu")
        limit = zeta if zeta is not None else potential.W.norm_limit
        damping = 1.0 if limit is None else 2 / (2 + limit**2)
        super().__init__(Input(Identity(), bias=False) + potential, "identity", damping=damping)

    output_form = "affine"

    def initial_state(self, x: Tensor, *others_and_context: Any) -> State:
        """Return the input u, the solution for a potential of zero."""
        return x

    def output(self, state: State, context: Context) -> Tensor:
        assert isinstance(state, Tensor)
        return 2 * state - context.parts["input"]["c"]

    @property
    def limits(self) -> StepBounds[float]:
        curvature = self.energy.limits.curvature
        return StepBounds(None if curvature is None else self._factor(curvature))

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        inherited, s = super().bounds(context, layout), self.damping

        def contraction() -> Tensor | None:
            curvature = self.energy.bounds(context, layout).curvature
            if curvature is None:
                return None
            return torch.maximum((s * (1 + curvature) - 1).abs(), curvature * 0 + abs(1 - s))

        return StepBounds(contraction, lambda: inherited.input)

    def _factor(self, curvature: float) -> float:
        s = self.damping
        return max(abs(1 - s), abs(s * (1 + curvature) - 1))

    @property
    def guarantee(self) -> str | None:
        """Guarantee of a unique, 1-Lipschitz equilibrium."""
        return "unique, 1-Lipschitz in the input"
