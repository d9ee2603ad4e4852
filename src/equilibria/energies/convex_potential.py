"""A sum of convex ridge functions, the potential of one layer of a network."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from equilibria.activations import Activation, ReLU, get_activation
from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.rounding import Rounding
from equilibria.energies.terms import one_tensor
from equilibria.operators import as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.operators.rounding import application_rounding, upper_norm


class ConvexPotential(Energy):
    """1ᵀS(Wz + b), S′ = σ: convex, because σ does not decrease; ∇ = Wᵀσ(Wz + b).

    Beside ½‖z − u‖² it makes the equilibrium z = u − Wᵀσ(Wz + b) a proximal operator of u, for
    every W: with this sign nothing has to be small.

    Examples:
        >>> energy = eq.Input(torch.eye(2)) + eq.energies.ConvexPotential(torch.eye(2), bias=False)
        >>> layer = eq.EquilibriumLayer(energy, activation="identity")
        >>> layer(torch.tensor([[2.0, -2.0]])).round(decimals=2)  # z = x − max(z, 0)
        tensor([[ 1., -2.]], grad_fn=...)
    """

    def __init__(
        self, W: OperatorLike, bias: bool | Tensor = True, activation: str | Activation = "relu"
    ) -> None:
        super().__init__()
        self.W = as_operator(W)
        self.activation = get_activation(activation)
        self.bias: nn.Parameter | None = None
        if isinstance(bias, Tensor):
            self.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        elif bias:
            if self.W.bias_shape is None:
                raise ValueError(
                    f"{type(self.W).__name__} does not say how many channels its output has: "
                    "give the bias as a tensor"
                )
            self.bias = nn.Parameter(torch.zeros(self.W.bias_shape))

    @property
    def formula(self) -> str:
        return "1ᵀS(Wy)" if self.bias is None else "1ᵀS(Wy + b)"

    def inject(self, *inputs: Tensor) -> Context:
        return Context()

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        return {"W": self.W.weights(layout[0])}

    def value(self, state: State, context: Context) -> Tensor:
        return sum_per_sample(self.activation.primitive(self._lifted(state, context)))

    def descent(self, state: State, context: Context) -> State:
        y = self.activation(self._lifted(state, context))
        return -self.W.adjoint(y, context.weights("W"))

    def _lifted(self, state: State, context: Context) -> Tensor:
        lifted: Tensor = self.W(one_tensor(state, self), context.weights("W"))
        return lifted if self.bias is None else lifted + self.bias

    @property
    def limits(self) -> Bounds[float]:
        limit = self.W.norm_limit
        curvature = None if limit is None else self.activation.lipschitz * limit**2
        return Bounds(curvature, concavity=0.0)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        norm = self.W.norm_bound(layout[0])
        return Bounds(self.activation.lipschitz * norm.square(), concavity=norm * 0, input=norm * 0)

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """fl(Wᵀσ(fl(Wz + b))) and an addition, σ = ReLU: what is linear in ‖z‖ and in ‖b‖."""
        assert isinstance(exact, ConvexPotential)
        own = application_rounding(self.W, exact.W, layout[0], unit)
        if own is None or type(self.activation) is not ReLU:
            return None
        norm = upper_norm(exact.W, layout[0])
        after = norm + own + 4 * unit * (norm + own)
        in_state = after * (own + 4 * unit * (norm + own)) + (own + 4 * unit * after) * norm
        offset = 0.0
        if exact.bias is not None:
            outputs = math.prod(self.W.output_shape(layout[0])) / exact.bias.numel()
            size = float(torch.linalg.vector_norm(exact.bias.double())) * math.sqrt(outputs)
            offset = size * (4 * unit * after + own + 4 * unit * after)
        return Rounding(state=in_state, extra=lambda _, y: torch.full_like(y, offset))
