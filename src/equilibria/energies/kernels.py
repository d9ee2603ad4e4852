"""Polynomial and sigmoid kernels between the input and the state (GEQ Table 4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

from torch import Tensor

from equilibria.context import Context, State
from equilibria.context.state import Layout, sum_per_sample
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds
from equilibria.energies.terms import Input, one_tensor
from equilibria.operators.compose import OperatorLike
from equilibria.registry import check_choice, check_positive

Form = Literal["scaled", "printed"]

SIGMOID_CURVATURE = 4 / (3 * math.sqrt(3))
"""Maximum of |tanh″| = 2|tanh|(1 − tanh²), attained at tanh² = 1/3: 0.7698."""


class InnerProductKernel(Energy, ABC):
    """Kernel of the inner product ⟨c, y⟩, c = Ux + b, which replaces `Input`.

    With form="scaled" the inner product is divided by n, per sample the larger of ‖c‖²/ρ and the
    number of entries of y. Near y = 0 the kernels then act like `Input`, and ‖c‖²/n ≤ ρ bounds the
    curvature. n is part of the graph. form="printed" is the formula of GEQ's Table 4.
    """

    def __init__(
        self,
        U: OperatorLike,
        bias: bool | Tensor | None = None,
        *,
        rho: float = 0.1,
        form: Form = "scaled",
    ) -> None:
        super().__init__()
        check_positive(rho=rho)
        check_choice(get_args(Form), form=form)
        self.input = Input(U, bias)
        self.rho = rho
        self.form = form

    @property
    def _inner(self) -> str:
        return "⟨Ux, y⟩" if self.input.bias is None else "⟨Ux + b, y⟩"

    def inject(self, *inputs: Tensor) -> Context:
        context = self.input.inject(*inputs)
        c = context["c"]
        if self.form == "printed":
            return context
        size = sum_per_sample(c.square()) / self.rho
        return context.with_sample(n=size.clamp(min=math.prod(c.shape[1:])))

    def initial_state(self, context: Context) -> State:
        return self.input.initial_state(context)

    def first_descent(self, context: Context) -> State | None:
        return context["c"] if self.form == "scaled" else None

    @abstractmethod
    def attention(self, state: State, context: Context) -> Tensor:
        """Return the factor of c = Ux + b in the descent −∇E of each sample, shape (B,)."""

    def descent(self, state: State, context: Context) -> State:
        c = context["c"]
        factor = self.attention(state, context).to(c.dtype)
        return factor.reshape(-1, *[1] * (c.dim() - 1)) * c

    def _product(self, state: State, context: Context) -> Tensor:
        """Return ⟨c, y⟩ of each sample."""
        return sum_per_sample(context["c"] * one_tensor(state, self))

    @property
    @abstractmethod
    def _curvature_factor(self) -> float | None:
        """Factor k in ‖∇²E‖ ≤ k‖c‖²/n (n = 1 for form="printed"), or None if unbounded."""

    @property
    def limits(self) -> Bounds[float]:
        factor = self._curvature_factor
        return Bounds(None if factor is None or self.form == "printed" else factor * self.rho)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        factor = self._curvature_factor
        if factor is None:
            return Bounds()
        squares = sum_per_sample(context["c"].square())
        shares = squares if self.form == "printed" else squares / context["n"]
        return Bounds(factor * shares)

    def extra_repr(self) -> str:
        return f"form={self.form!r}" + (f", rho={self.rho}" if self.form == "scaled" else "")


class PolynomialKernel(InnerProductKernel):
    """Polynomial kernel −(n/d)(1 + ⟨c, y⟩/n)^d of c = Ux + b, with descent (1 + ⟨c, y⟩/n)^{d−1} c.

    n is the larger of ‖c‖²/ρ and the number of entries of y. ‖∇²E‖ = (d−1)|1 + ⟨c, y⟩/n|^{d−2}
    ‖c‖²/n is at most ρ for d = 2, and unbounded in y for d ≥ 3.

    The paper's −⟨c, y⟩^d (form="printed") has zero slope at y = 0, where solves start and therefore
    stay, and decreases faster than ½‖y‖² grows.

    Args:
        U: Linear operator from the input to the shape of the state.
        degree: d, a positive integer.
        bias: See `Input`.
        rho: ρ, the bound on ‖c‖²/n for form="scaled".
        form: "scaled", or "printed" for the formula of the paper.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.energies.PolynomialKernel(torch.eye(2), degree=2))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        U: OperatorLike,
        degree: int = 2,
        bias: bool | Tensor | None = None,
        *,
        rho: float = 0.1,
        form: Form = "scaled",
    ) -> None:
        super().__init__(U, bias, rho=rho, form=form)
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"degree must be a positive integer, got {degree}")
        self.degree = degree

    @property
    def formula(self) -> str:
        if self.form == "printed":
            return f"−{self._inner}^{self.degree}"
        return f"−(n/{self.degree})(1 + {self._inner}/n)^{self.degree}"

    def value(self, state: State, context: Context) -> Tensor:
        product = self._product(state, context)
        if self.form == "printed":
            return -product.pow(self.degree)
        n = context["n"]
        return -n / self.degree * (1 + product / n).pow(self.degree)

    def attention(self, state: State, context: Context) -> Tensor:
        product = self._product(state, context)
        if self.form == "printed":
            return self.degree * product.pow(self.degree - 1)
        return (1 + product / context["n"]).pow(self.degree - 1)

    @property
    def _curvature_factor(self) -> float | None:
        if self.degree > 2:
            return None
        return float(self.degree - 1) * (2 if self.form == "printed" else 1)

    def extra_repr(self) -> str:
        return f"degree={self.degree}, {super().extra_repr()}"


class SigmoidKernel(InnerProductKernel):
    """Sigmoid kernel −n tanh(⟨c, y⟩/n) of c = Ux + b, with descent (1 − tanh²(⟨c, y⟩/n)) c.

    n is the larger of ‖c‖²/ρ and the number of entries of y; ‖∇²E‖ ≤ 0.77 ‖c‖²/n ≤ 0.77 ρ. The
    paper's −tanh⟨c, y⟩ (form="printed") saturates when ⟨c, y⟩ is more than a few, which a single
    pixel can cause, and the input then has no effect.

    Args:
        U: Linear operator from the input to the shape of the state.
        bias: See `Input`.
        rho: ρ, the bound on ‖c‖²/n for form="scaled".
        form: "scaled", or "printed" for the formula of the paper.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.energies.SigmoidKernel(torch.eye(2)))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    @property
    def formula(self) -> str:
        return f"−tanh{self._inner}" if self.form == "printed" else f"−n·tanh({self._inner}/n)"

    def value(self, state: State, context: Context) -> Tensor:
        product = self._product(state, context)
        if self.form == "printed":
            return -product.tanh()
        n = context["n"]
        return -n * (product / n).tanh()

    def attention(self, state: State, context: Context) -> Tensor:
        product = self._product(state, context)
        if self.form == "scaled":
            product = product / context["n"]
        return 1 - product.tanh().square()

    @property
    def _curvature_factor(self) -> float:
        return SIGMOID_CURVATURE
