"""Feature regularizers R(z) (OptEq Table 2), and the energy term that puts one into the objective.

The operators of Table 2 are corrected: the gradient step of feature incay must expand, not shrink,
and that of decorrelation has I − Proj, a factor 2 and the step size. Those that relate the samples
of a batch to each other are in `batch_regularizers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from equilibria.context import Context, Entry, Layout, State, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.energies.batch_regularizers import HSIC, Decorrelation
from equilibria.energies.prior import Regularizer
from equilibria.energies.terms import one_tensor
from equilibria.operators import LinearOperator, as_operator
from equilibria.registry import Registry

Step = Literal["auto", "proximal", "gradient"]


@dataclass(frozen=True)
class L2(Regularizer):
    """½‖z‖²: feature decay."""

    def value(self, z: Tensor) -> Tensor:
        return 0.5 * sum_per_sample(z.square())

    def gradient(self, z: Tensor) -> Tensor:
        return z

    def proximal(self, z: Tensor, gamma: float) -> Tensor:
        return z / (1 + gamma)


@dataclass(frozen=True)
class L1(Regularizer):
    """‖z‖₁: sparsity. The feature that is sparse is `proximal(z*)`, not z* itself."""

    def value(self, z: Tensor) -> Tensor:
        return sum_per_sample(z.abs())

    def gradient(self, z: Tensor) -> Tensor:
        return z.sign()

    def proximal(self, z: Tensor, gamma: float) -> Tensor:
        return z.sign() * (z.abs() - gamma).clamp_min(0)


@dataclass(frozen=True)
class Incay(Regularizer):
    """2/(‖z‖² + 2ε): feature incay, which lengthens features. Not convex."""

    convex: ClassVar[bool] = False
    epsilon: float = 1.0

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, not {self.epsilon}")

    def value(self, z: Tensor) -> Tensor:
        return 2 / (sum_per_sample(z.square()) + 2 * self.epsilon)

    def gradient(self, z: Tensor) -> Tensor:
        size = sum_per_sample(z.square()) + 2 * self.epsilon
        return (-4 / size.square()).view(-1, *[1] * (z.dim() - 1)) * z


class FeatureRegularizer(Energy):
    """γR(z) at the feature z = Wᵀy (Theorem 4): the equilibrium minimizes φ + γR.

    step="gradient": the term is γR itself. step="proximal" (R need not be smooth): it is γ times
    the Moreau envelope of R with parameter γ, whose gradient step is the proximal operator; for L1
    that is Huber's function, and the sparse feature is `regularizer.proximal(z*, gamma)`. "auto"
    takes the proximal operator where R has one.
    """

    def __init__(
        self,
        W: LinearOperator | nn.Module | Tensor,
        regularizer: str | Mapping[str, Any] | Regularizer,
        gamma: float,
        step: Step = "auto",
    ) -> None:
        super().__init__()
        regularizer = get_regularizer(regularizer)
        if not gamma >= 0:
            raise ValueError(f"gamma must not be negative, not {gamma}")
        if step not in ("auto", "proximal", "gradient"):
            raise ValueError(f"step must be 'auto', 'proximal' or 'gradient', not {step!r}")
        has_proximal = regularizer.proximal(torch.zeros(1, 1), gamma) is not None
        if step == "proximal" and not has_proximal:
            raise ValueError(
                f"{type(regularizer).__name__} has no proximal operator in closed form: "
                "use step='gradient'"
            )
        self.W = as_operator(W)
        self.regularizer = regularizer
        self.gamma = gamma
        self.proximal = has_proximal and step != "gradient"
        self.couples_batch = regularizer.couples_batch

    @property
    def formula(self) -> str:
        return f"{self.gamma:g}·{type(self.regularizer).__name__}(Wᵀy)"

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        return {"W": self.W.weights(self.W.input_shape(layout[0]))}

    def value(self, state: State, context: Context) -> Tensor:
        z = self.W.adjoint(one_tensor(state, self), context.weights("W"))
        near = self.regularizer.proximal(z, self.gamma) if self.proximal else None
        if near is None:
            return self.gamma * self.regularizer.value(z)
        # γ M_R^γ(z) = γR(p) + ½‖z − p‖², p = prox_{γR}(z).
        return self.gamma * self.regularizer.value(near) + 0.5 * sum_per_sample((z - near).square())

    def descent(self, state: State, context: Context) -> State:
        weights = context.weights("W")
        z = self.W.adjoint(one_tensor(state, self), weights)
        near = self.regularizer.proximal(z, self.gamma) if self.proximal else None
        change = self.gamma * self.regularizer.gradient(z) if near is None else z - near
        descent: Tensor = -self.W(change, weights)
        return descent

    def extra_repr(self) -> str:
        return f"{self.regularizer}, gamma={self.gamma}"


_regularizers: Registry[Regularizer] = Registry(
    "regularizer",
    Regularizer,
    {"l1": L1, "l2": L2, "incay": Incay, "decorrelation": Decorrelation, "hsic": HSIC},
)
register_regularizer = _regularizers.register
list_regularizers = _regularizers.names
get_regularizer = _regularizers.resolve
