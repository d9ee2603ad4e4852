"""The two terms of OptEq's energy −⟨Ux + b, y⟩ − ½‖Wᵀy‖², and sums over branches."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.context import Entry
from equilibria.context.state import Layout, state_tensors, sum_per_sample
from equilibria.energies import capabilities
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds, UnitBound, all_known
from equilibria.energies.compose import Terms
from equilibria.energies.facts import Facts
from equilibria.energies.rounding import Rounding
from equilibria.operators import as_operator
from equilibria.operators.compose import OperatorLike
from equilibria.operators.rounding import application_rounding, upper_norm


class Input(Energy):
    """Linear term −⟨Ux + b, y⟩, through which the input enters the objective.

    Args:
        U: Linear operator from the input to the shape of the state, or a matrix.
        bias: The tensor b; True for a trainable b that starts at zero; False for none. By default
            True if the number of output channels of U is known.
        of: Index of the input x in a layer with several inputs.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)), activation="relu")
        >>> layer(torch.tensor([[1.0, -2.0]]))  # argmin of ½‖y‖² − ⟨x, y⟩ over y ≥ 0
        tensor([[1., 0.]], grad_fn=...)
    """

    facts = Facts(is_concave=True, is_quadratic=True)
    limits = Bounds(0.0)

    def __init__(self, U: OperatorLike, bias: bool | Tensor | None = None, *, of: int = 0) -> None:
        super().__init__()
        self.U = as_operator(U)
        self.of = of
        self.bias: nn.Parameter | None
        if isinstance(bias, Tensor):
            self.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        elif bias is False or (bias is None and self.U.bias_shape is None):
            self.bias = None
        elif self.U.bias_shape is not None:
            self.bias = nn.Parameter(torch.zeros(self.U.bias_shape))
        else:
            raise ValueError(
                f"the number of output channels of {type(self.U).__name__} is unknown: pass the "
                "bias as a tensor"
            )

    @property
    def formula(self) -> str:
        return "−⟨Ux, y⟩" if self.bias is None else "−⟨Ux + b, y⟩"

    def inject(self, *inputs: Tensor) -> Context:
        if not 0 <= self.of < len(inputs):
            raise ValueError(
                f"Input(of={self.of}) does not exist: the layer got {len(inputs)} inputs, and `of` "
                "counts from 0"
            )
        injected = self.U(inputs[self.of])
        return Context(sample={"c": injected if self.bias is None else injected + self.bias})

    def initial_state(self, context: Context) -> State:
        return torch.zeros_like(context["c"])

    def first_descent(self, context: Context) -> State:
        """Return the descent at the zero state, Ux + b."""
        return context["c"]

    def value(self, state: State, context: Context) -> Tensor:
        return -sum_per_sample(context["c"] * one_tensor(state, self))

    def descent(self, state: State, context: Context) -> State:
        return context["c"]

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        shape = self._input_shape(context)

        def units() -> list[UnitBound]:
            rows = self.U.row_norms(shape)
            return [UnitBound(rows, torch.zeros_like(rows))]

        zero = context["c"].new_zeros(())
        return Bounds(zero, input=lambda: self.U.norm_bound(shape), units=units)

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Bound the errors of Ux and of two additions: of b, and of Ux + b to the other terms."""
        assert isinstance(exact, Input)
        shape = self._input_shape(context)
        error = application_rounding(self.U, exact.U, shape, unit)
        if error is None:
            return None
        return Rounding(injected=4 * unit, feature=error, carried=upper_norm(exact.U, shape))

    def _input_shape(self, context: Context) -> tuple[int, ...]:
        return self.U.input_shape(tuple(context["c"].shape[1:]))


class Quadratic(Energy):
    """Concave term −½‖Wᵀy‖², which adds WWᵀy to the argument of the activation.

    Args:
        W: Linear operator from features z = Wᵀy to states y, or a matrix.

    Examples:
        >>> energy = eq.Input(torch.eye(2)) + eq.Quadratic(0.5 * torch.eye(2))
        >>> layer = eq.EquilibriumLayer(energy, activation="identity")
        >>> layer(torch.tensor([[3.0, 6.0]])).round(decimals=2)  # x/(1 − ¼)
        tensor([[4., 8.]], grad_fn=...)
    """

    formula = "−½‖Wᵀy‖²"

    def __init__(self, W: OperatorLike) -> None:
        super().__init__()
        self.W = as_operator(W)

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        # An operator without weights may be the identity, which returns y itself, not a copy.
        return _QUADRATIC if self.W.weight_count > 0 else _WITHOUT_WEIGHTS

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
    def limits(self) -> Bounds[float]:
        limit = self.W.norm_limit
        return Bounds(None if limit is None else limit**2)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        shape = self.W.input_shape(layout[0])

        def units() -> list[UnitBound]:
            rows = self.W.row_norms(shape)
            return [UnitBound(torch.zeros_like(rows), rows)]

        return Bounds(
            lambda: self.W.norm_bound(shape).square(),
            input=lambda: self.W.norm_bound(shape) * 0,
            units=units,
        )

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Bound the rounding error of WWᵀy and of one addition, relative to ‖y‖.

        The bound is (‖W‖ + ε)² − ‖W‖² + 4u(‖W‖ + ε)², with ε the error of applying W
        (`application_rounding`) and u the unit roundoff.
        """
        assert isinstance(exact, Quadratic)
        shape = self.W.input_shape(layout[0])
        error = application_rounding(self.W, exact.W, shape, unit)
        if error is None:
            return None
        norm = upper_norm(exact.W, shape)
        return Rounding(state=error * (2 * norm + error) + 4 * unit * (norm + error) ** 2)


_WITHOUT_WEIGHTS = Facts(is_concave=True, is_quadratic=True, vanishes_at_zero=True)
_QUADRATIC = dataclasses.replace(_WITHOUT_WEIGHTS, owns_descent=True)


def one_tensor(state: State, term: Energy) -> Tensor:
    """Return a state that must consist of one tensor."""
    if isinstance(state, Tensor):
        return state
    raise TypeError(f"{type(term).__name__} needs a state of one tensor, got {len(state)} tensors")


class Branches(Terms):
    """Sum Σᵢ Eᵢ(yᵢ; x) of one term per branch of the state (y₁, …, y_L), with a shared input x.

    The U of a branch with lower resolution must pool the input, e.g. `Conv2d(…) @ AveragePool(2)`.

    Args:
        terms: Energies Eᵢ, one per branch.

    Examples:
        >>> both = eq.energies.Branches([eq.Input(torch.eye(2)), eq.Input(2 * torch.eye(2))])
        >>> x = torch.ones(1, 2)
        >>> both.value((x, x), both.inject(x))  # −⟨x, x⟩ − ⟨2x, x⟩
        tensor([-6.], grad_fn=...)
    """

    def __init__(self, terms: Sequence[Energy]) -> None:
        if not terms:
            raise ValueError("Branches needs at least one energy, got none")
        super().__init__({str(index): term for index, term in enumerate(terms)})

    def states(self, state: State) -> Sequence[State]:
        return state_tensors(state)

    def layouts(self, layout: Layout) -> Sequence[Layout]:
        return [(shape,) for shape in layout]

    def branches(self) -> list[Energy]:
        """Return the energies of the branches."""
        return [term for _, term in self.named_terms()]

    @property
    def formula(self) -> str:
        formulas = {term.formula for term in self.branches()}
        if len(formulas) > 1:
            return " + ".join(f"[branch: {formula}]" for formula in sorted(formulas))
        return f"Σᵢ [{indexed(formulas.pop())}]"

    def initial_state(self, context: Context) -> State | None:
        pairs = zip(self.branches(), context.parts.values(), strict=True)
        return self._state(term.initial_state(part) for term, part in pairs)

    def first_descent(self, context: Context) -> State | None:
        """Return the descent of every branch at zero, if all are known."""
        pairs = zip(self.branches(), context.parts.values(), strict=True)
        return self._state(capabilities.first_descent(term, part) for term, part in pairs)

    def _state(self, pieces: Iterable[State | None]) -> State | None:
        tensors: list[State] | None = all_known(pieces)
        return None if tensors is None else tuple(one_tensor(piece, self) for piece in tensors)

    def descent(self, state: State, context: Context) -> State:
        each = self.each(context, self.states(state))
        return tuple(one_tensor(term.descent(y, part), self) for term, part, y in each)

    @property
    def limits(self) -> Bounds[float]:
        return functools.reduce(Bounds.beside, (term.limits for term in self.branches()))

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        return functools.reduce(Bounds.beside, self._term_bounds(context, layout))

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Return the rounding error bound of the branches, if all have one."""
        bounds = self._roundings(exact, context, layout, unit)
        return None if bounds is None else functools.reduce(Rounding.beside, bounds)


def indexed(formula: str) -> str:
    """Add the index i to the symbols of a formula."""
    return re.sub(r"(?<![A-Za-z])(Wₕ|[WUby])(?![a-wz])", r"\1ᵢ", formula)
