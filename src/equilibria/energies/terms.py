"""The two terms of OptEq's energy −⟨Ux + b, y⟩ − ½‖Wᵀy‖²."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from equilibria.context import Context, Entry, Layout, State, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.operators import LinearOperator, as_operator


class Input(Energy):
    """−⟨Ux + b, y⟩: how the input enters the objective.

    `bias`: a tensor b, True or False; by default b starts at zero where U knows its channels.
    """

    concave = True

    def __init__(
        self, U: LinearOperator | nn.Module | Tensor, bias: bool | Tensor | None = None
    ) -> None:
        super().__init__()
        self.U = as_operator(U)
        self.bias: nn.Parameter | None
        if isinstance(bias, Tensor):
            self.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        elif bias is False or (bias is None and self.U.bias_shape is None):
            self.bias = None
        elif self.U.bias_shape is not None:
            self.bias = nn.Parameter(torch.zeros(self.U.bias_shape))
        else:
            raise ValueError(
                f"{type(self.U).__name__} does not say how many channels its output has: "
                "give the bias as a tensor"
            )

    @property
    def formula(self) -> str:
        return "−⟨Ux, y⟩" if self.bias is None else "−⟨Ux + b, y⟩"

    def inject(self, x: Tensor) -> Context:
        injected = self.U(x)
        return Context(sample={"c": injected if self.bias is None else injected + self.bias})

    def initial_state(self, context: Context) -> State:
        return torch.zeros_like(context["c"])

    def first_descent(self, context: Context) -> State:
        return context["c"]

    def value(self, state: State, context: Context) -> Tensor:
        return -sum_per_sample(context["c"] * one_tensor(state, self))

    def descent(self, state: State, context: Context) -> State:
        return context["c"]

    @property
    def curvature_limit(self) -> float:
        return 0.0

    def curvature_bound(self, context: Context, layout: Layout) -> Tensor:
        return context["c"].new_zeros(())


class Quadratic(Energy):
    """−½‖Wᵀy‖²: with z = Wᵀy, the concave part that makes y = σ(WWᵀy + …) an equilibrium."""

    concave = True
    vanishes_at_zero = True

    def __init__(self, W: LinearOperator | nn.Module | Tensor) -> None:
        super().__init__()
        self.W = as_operator(W)

    @property
    def formula(self) -> str:
        return "−½‖Wᵀy‖²"

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        return {"W": self.W.weights(self.W.input_shape(layout[0]))}

    def value(self, state: State, context: Context) -> Tensor:
        z = self.W.adjoint(one_tensor(state, self), context.weights("W"))
        return -0.5 * sum_per_sample(z.square())

    def descent(self, state: State, context: Context) -> State:
        weights = context.weights("W")
        descent: Tensor = self.W(self.W.adjoint(one_tensor(state, self), weights), weights)
        return descent

    @property
    def curvature_limit(self) -> float | None:
        limit = self.W.norm_limit
        return None if limit is None else limit**2

    def curvature_bound(self, context: Context, layout: Layout) -> Tensor:
        return self.W.norm_bound(self.W.input_shape(layout[0])).square()


def one_tensor(state: State, term: Energy) -> Tensor:
    if isinstance(state, Tensor):
        return state
    raise TypeError(f"{type(term).__name__} acts on a state of one tensor, not of {len(state)}")
