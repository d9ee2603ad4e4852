"""Reflections of general dense layers, solved in the dual: one number per row of W.

With y = σ(Wz + b), σ = ReLU, the equilibrium is z = u − Wᵀy, where y ≥ 0 minimizes

    ½‖y‖² + ½‖Wᵀy‖² − ⟨Wu + b, y⟩.

Its map is y = σ(Wu + b − WWᵀy). WWᵀ is computed once per solve, so that an iteration takes one
product with a matrix of rows × rows instead of two with rows × columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.terms import one_tensor
from equilibria.equilibrium import EnergyCell
from equilibria.models.reflection.cell import ReflectionCell
from equilibria.operators import Dense


class DualPotential(Energy):
    """Convex energy ½‖Wᵀy‖² − ⟨Wu + b, y⟩ of the active units y of a reflection.

    Args:
        W: Matrix of the potential.
    """

    formula = "½‖Wᵀy‖² − ⟨Wu + b, y⟩"

    def __init__(self, W: Dense) -> None:
        super().__init__()
        self.W = W
        self.bias = nn.Parameter(torch.zeros(W.bias_shape))

    def inject(self, *inputs: Tensor) -> Context:
        (u,) = inputs
        (weight,) = self.W.weights(tuple(u.shape[1:]))
        lifted = self.W(u, (weight,)) + self.bias
        return Context(sample={"c": lifted, "u": u}, shared={"W": weight})

    def initial_state(self, context: Context) -> State:
        return torch.zeros_like(context["c"])

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        (weight,) = self.W.weights()
        return {"gram": weight @ weight.mT}

    def value(self, state: State, context: Context) -> Tensor:
        y = one_tensor(state, self)
        pulled = self.W.adjoint(y, (context["W"],))
        return 0.5 * sum_per_sample(pulled.square()) - sum_per_sample(context["c"] * y)

    def descent(self, state: State, context: Context) -> State:
        return context["c"] - one_tensor(state, self) @ context["gram"]

    @property
    def limits(self) -> Bounds[float]:
        limit = self.W.norm_limit
        return Bounds(None if limit is None else limit**2, concavity=0.0)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        norm = self.W.norm_bound((self.W.in_features,))
        return Bounds(norm.square(), concavity=norm * 0, input=norm)


class DualReflectionCell(ReflectionCell):
    """Reflection 2z − u at z = u − Wᵀσ(Wz + b), with the state y = σ(Wz + b).

    The damped map is a contraction with factor ζ²/(2 + ζ²), as that of `ReflectionCell`.

    Args:
        W: Matrix of the potential.
        zeta: Upper bound on ‖W‖.

    Examples:
        >>> from equilibria.models.reflection.dual import DualReflectionCell
        >>> layer = eq.EquilibriumLayer(cell=DualReflectionCell(eq.Dense(4, 2), zeta=2.0))
        >>> layer(torch.ones(1, 4)).shape, layer.solve(torch.ones(1, 4)).state.shape
        (torch.Size([1, 4]), torch.Size([1, 2]))
    """

    output_form = "affine"

    def __init__(self, W: Dense, *, zeta: float) -> None:
        EnergyCell.__init__(self, DualPotential(W), "relu", damping=2 / (2 + zeta**2))

    def initial_state(self, x: Tensor, *others_and_context: Any) -> State:
        """Return y = 0."""
        return EnergyCell.initial_state(self, x, *others_and_context)

    def first_image(self, context: Context) -> State:
        """Return the damped map at y = 0, which is σ(s(Wu + b)).

        Args:
            context: Result of `inject`.
        """
        return self.activation(self.damping * context["c"])

    @property
    def dual(self) -> DualPotential:
        """The energy, which is the objective without ½‖y‖²."""
        assert isinstance(self.energy, DualPotential)
        return self.energy

    def output(self, state: State, context: Context) -> Tensor:
        pulled = torch.nn.functional.linear(one_tensor(state, self.energy), context["W"].mT)
        return torch.sub(context["u"], pulled, alpha=2)
