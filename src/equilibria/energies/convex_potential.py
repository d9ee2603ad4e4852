"""Sum of convex ridge functions: the potential of one network layer."""

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
    """Convex energy 1ᵀS(Wz + b) of a state z, where S is a primitive of the activation σ.

    Its gradient is Wᵀσ(Wz + b), and it is convex because σ is nondecreasing. Added to ½‖z − u‖², it
    makes the equilibrium z = u − Wᵀσ(Wz + b) a proximal operator of u for every W, without a bound
    on ‖W‖.

    Args:
        W: Linear operator, or a matrix of shape (outputs, inputs).
        bias: The tensor b; True for a trainable b that starts at zero; False for none.
        activation: The activation σ.

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
                    f"the number of output channels of {type(self.W).__name__} is unknown: pass "
                    "the bias as a tensor"
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
        return sum_per_sample(self.activation.primitive(self.lifted(state, context)))

    def descent(self, state: State, context: Context) -> State:
        y = self.activation(self.lifted(state, context))
        return -self.W.adjoint(y, context.weights("W"))

    def lifted(self, state: State, context: Context) -> Tensor:
        """Return Wz + b, the argument of the activation.

        Args:
            state: The state z.
            context: Effective weights of W.
        """
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
        """Bound the rounding error of the gradient Wᵀσ(Wz + b) and of one addition, for σ = ReLU.

        The bound is linear in ‖z‖ and ‖b‖.
        """
        assert isinstance(exact, ConvexPotential)
        error = application_rounding(self.W, exact.W, layout[0], unit)
        if error is None or type(self.activation) is not ReLU:
            return None
        norm = upper_norm(exact.W, layout[0])
        computed = norm + error + 4 * unit * (norm + error)
        in_state = (
            computed * (error + 4 * unit * (norm + error)) + (error + 4 * unit * computed) * norm
        )
        offset = 0.0
        if exact.bias is not None:
            copies = math.prod(self.W.output_shape(layout[0])) / exact.bias.numel()
            size = float(torch.linalg.vector_norm(exact.bias.double())) * math.sqrt(copies)
            offset = size * (4 * unit * computed + error + 4 * unit * computed)
        return Rounding(state=in_state, extra=lambda _, y: torch.full_like(y, offset))
