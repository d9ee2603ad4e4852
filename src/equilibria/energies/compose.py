"""Sums and multiples of energy terms."""

from __future__ import annotations

import functools
import itertools
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import Layout, map_state, state_tensors, unflatten_state
from equilibria.energies import capabilities
from equilibria.energies.base import Energy
from equilibria.energies.bounds import Bounds, all_known
from equilibria.energies.facts import Facts
from equilibria.energies.function import FunctionEnergy
from equilibria.energies.rounding import Rounding

P = TypeVar("P")


class Composite(Energy):
    """Energy composed of other energies.

    Subclasses define the terms (`named_terms`), the part of a context that belongs to each
    (`each`), and how these parts form a context (`_joined`). Methods called once per solve, such as
    `inject`, are forwarded to every term.
    """

    _count: int
    """Number of terms; stored because every step reads it."""

    @abstractmethod
    def named_terms(self) -> list[tuple[str, Energy]]:
        """Return pairs of name and term."""

    @abstractmethod
    def each(self, context: Context, pieces: Iterable[P]) -> list[tuple[Energy, Context, P]]:
        """Return every term with its part of the context and its entry of `pieces`."""

    @abstractmethod
    def _joined(self, parts: Iterable[Context]) -> Context: ...

    def states(self, state: State) -> Sequence[State]:
        """Return the part of the state that each term acts on."""
        return [state] * self._count

    def layouts(self, layout: Layout) -> Sequence[Layout]:
        """Return the part of the layout that each term acts on."""
        return [layout] * self._count

    def inject(self, *inputs: Tensor) -> Context:
        return self._joined(term.inject(*inputs) for _, term in self.named_terms())

    def complete(self, context: Context, layout: Layout) -> Context:
        each = self.each(context, self.layouts(layout))
        return self._joined(term.complete(part, shapes) for term, part, shapes in each)

    def calibrate(self, image: State, context: Context) -> Context:
        each = self.each(context, self.states(image))
        return self._joined(capabilities.calibrate(term, y, part) for term, part, y in each)

    def refresh(self, state: State, context: Context) -> Context:
        each = self.each(context, self.states(state))
        return self._joined(capabilities.refresh(term, y, part) for term, part, y in each)

    def initial_state(self, context: Context) -> State | None:
        each = self.each(context, itertools.repeat(None, self._count))
        starts = (term.initial_state(part) for term, part, _ in each)
        return next((start for start in starts if start is not None), None)

    def _term_bounds(self, context: Context, layout: Layout) -> list[Bounds[Tensor]]:
        each = self.each(context, self.layouts(layout))
        return [term.bounds(part, shapes) for term, part, shapes in each]


class Terms(Composite):
    """Named terms; the context stores each term's context under the same name."""

    def __init__(self, terms: Mapping[str, Energy], *, owns_descent: bool = False) -> None:
        super().__init__()
        self.terms = nn.ModuleDict(terms)
        self._count = len(terms)
        self.facts = Facts.joined(
            (term.facts for term in terms.values()), owns_descent=owns_descent
        )

    def named_terms(self) -> list[tuple[str, Energy]]:
        return [(name, cast(Energy, term)) for name, term in self.terms.items()]

    def each(self, context: Context, pieces: Iterable[P]) -> list[tuple[Energy, Context, P]]:
        pairs = zip(self.named_terms(), pieces, strict=True)
        return [(term, context.parts[name], piece) for (name, term), piece in pairs]

    def _joined(self, parts: Iterable[Context]) -> Context:
        return Context(parts=dict(zip(self.terms, parts, strict=True)))

    def value(self, state: State, context: Context) -> Tensor:
        """Return the sum of the terms: per sample, or a scalar if a term couples the batch."""
        each = self.each(context, self.states(state))
        values = [term.value(y, part) for term, part, y in each]
        if self.facts.couples_batch:
            values = [value.sum() for value in values]
        return torch.stack(values).sum(dim=0)

    def _roundings(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> list[Rounding] | None:
        assert isinstance(exact, Terms)
        pairs = zip(self.named_terms(), exact.each(context, self.layouts(layout)), strict=True)
        bounds = [
            (name, capabilities.rounding(term, exact_term, part, shapes, unit))
            for (name, term), (exact_term, part, shapes) in pairs
        ]
        return all_known(None if bound is None else bound.inside(name) for name, bound in bounds)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Keep shared parameters shared with `assign=True`, which creates one per entry."""
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            names_of.setdefault(parameter, []).append(name)
        for parameter, names in names_of.items():
            values = [state_dict[name] for name in names if name in state_dict]
            if metadata.get("assign_to_params_buffers") and len(names) > 1 and values:
                shared = nn.Parameter(values[-1], requires_grad=parameter.requires_grad)
                state_dict.update(dict.fromkeys(names, shared))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def _added(a: Tensor, b: Tensor, owned: tuple[bool, bool]) -> Tensor:
    """Return the sum, in the memory of an `owned` summand if no graph needs its value."""
    same_format = a.stride() == b.stride() and a.dtype == b.dtype
    if torch.is_grad_enabled() or not same_format or a.shape != b.shape or not any(owned):
        return a + b
    return torch.add(a, b, out=a if owned[0] else b)


class Sum(Terms):
    """Sum of energy terms, each with a name: `energy["quadratic"]`.

    A term is named after its class or function; repeated names get a number. The context of the sum
    stores each term's context under the same name.

    Args:
        *terms: Energy terms, named automatically; the terms of a `Sum` are added one by one.
        **named: Energy terms under names you choose.

    Examples:
        >>> energy = eq.Input(torch.eye(2)) + eq.Quadratic(0.5 * torch.eye(2))
        >>> energy["quadratic"]
        Quadratic(
          (W): Dense(2, 2)
        )
    """

    def __init__(self, *terms: Energy, **named: Energy) -> None:
        flat: dict[str, Energy] = {}
        for term in terms:
            parts = term.named_terms() if isinstance(term, Sum) else [(term.name, term)]
            for name, part in parts:
                flat[_unused(name, flat)] = part
        all_terms = {**flat, **named}
        super().__init__(all_terms, owns_descent=len(all_terms) > 1)

    def __getitem__(self, name: str) -> Energy:
        """Return the term called `name`."""
        if name not in self.terms:
            raise KeyError(f"the sum has no term {name!r}; it has {list(self.terms)}")
        return cast(Energy, self.terms[name])

    @property
    def formula(self) -> str:
        joined = " + ".join(term.formula for _, term in self.named_terms())
        return joined.replace("+ −", "− ")

    def first_descent(self, context: Context) -> State | None:
        """Return the descent −∇E(0; x) at the zero state, if it costs nothing.

        That is so if only one term contributes to it and knows its value.
        """
        nonzero = [name for name, term in self.named_terms() if not term.facts.vanishes_at_zero]
        if len(nonzero) != 1:
            return None
        return capabilities.first_descent(self[nonzero[0]], context.parts[nonzero[0]])

    def descent(self, state: State, context: Context) -> State:
        if not self.terms:
            raise ValueError("a sum of energies needs at least one term")
        each = self.each(context, self.states(state))
        total, owned = each[0][0].descent(state, each[0][1]), each[0][0].facts.owns_descent
        for term, part, _ in each[1:]:
            add = functools.partial(_added, owned=(owned, term.facts.owns_descent))
            total, owned = map_state(add, total, term.descent(state, part)), True
        return unflatten_state(state, state_tensors(total))

    @property
    def limits(self) -> Bounds[float]:
        each = [term.limits for _, term in self.named_terms()]
        return functools.reduce(operator.add, each) if each else Bounds(0.0)

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        return functools.reduce(operator.add, self._term_bounds(context, layout))

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Return the rounding error bound of the sum, if every term has one."""
        bounds = self._roundings(exact, context, layout, unit)
        return None if bounds is None else functools.reduce(operator.add, bounds)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Also accept weights saved before version 0.2, which number the terms."""
        for number, (name, _) in enumerate(self.named_terms()):
            numbered = f"{prefix}terms.{number}."
            for key in [key for key in state_dict if key.startswith(numbered)]:
                state_dict[f"{prefix}terms.{name}.{key.removeprefix(numbered)}"] = state_dict.pop(
                    key
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _unused(name: str, taken: Mapping[str, object]) -> str:
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(unused for unused in itertools.chain([name], numbered) if unused not in taken)


class Scaled(Composite):
    """Multiple of an energy term.

    Args:
        term: The energy term.
        factor: A number, a tensor with one entry, or a trainable parameter with one entry.

    Examples:
        >>> term = 0.5 * eq.Input(torch.eye(2))
        >>> type(term).__name__, eq.EquilibriumLayer(term)(torch.ones(1, 2))
        ('Scaled', tensor([[0.5000, 0.5000]], grad_fn=...))
    """

    _count = 1

    def __init__(self, term: Energy, factor: float | Tensor) -> None:
        super().__init__()
        if not isinstance(factor, int | float | Tensor):
            raise TypeError(
                f"an energy can be multiplied only by a number, not by {type(factor).__name__}"
            )
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise ValueError(
                "an energy can be multiplied only by a tensor with one entry, got "
                f"{factor.numel()} entries"
            )
        self.term = term
        is_positive = not isinstance(factor, Tensor) and factor >= 0
        self.facts = replace(
            term.facts, is_concave=term.facts.is_concave and is_positive, owns_descent=False
        )
        self.factor: float | Tensor
        if isinstance(factor, Tensor) and not isinstance(factor, nn.Parameter):
            self.register_buffer("factor", factor)
        else:
            self.factor = factor

    @property
    def name(self) -> str:
        return self.term.name

    @property
    def formula(self) -> str:
        factor = "a" if isinstance(self.factor, Tensor) else f"{self.factor:g}"
        return f"{factor.replace('-', '−')}·[{self.term.formula}]"

    def named_terms(self) -> list[tuple[str, Energy]]:
        return [(self.term.name, self.term)]

    def each(self, context: Context, pieces: Iterable[P]) -> list[tuple[Energy, Context, P]]:
        return [(self.term, context, piece) for piece in pieces]

    def _joined(self, parts: Iterable[Context]) -> Context:
        (part,) = parts
        return part

    def value(self, state: State, context: Context) -> Tensor:
        return self.factor * self.term.value(state, context)

    def descent(self, state: State, context: Context) -> State:
        descent = self.term.descent(state, context)
        return map_state(lambda tensor: tensor * self.factor, descent)

    @property
    def limits(self) -> Bounds[float]:
        # Reading a factor that is stored on a device may synchronize the host.
        return Bounds() if isinstance(self.factor, Tensor) else self.term.limits * self.factor

    def bounds(self, context: Context, layout: Layout) -> Bounds[Tensor]:
        return self.term.bounds(context, layout) * self.factor

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Return the rounding error bound of the scaled term, if known."""
        assert isinstance(exact, Scaled)
        term_error = capabilities.rounding(self.term, exact.term, context, layout, unit)
        curvature = exact.term.bounds(context, layout).curvature
        if term_error is None or curvature is None:
            return None
        # The product is rounded, and the factor itself may be (1/μ).
        product_error = Rounding(state=4 * unit * float(curvature), injected=4 * unit)
        return (term_error + product_error) * abs(float(self.factor))


def as_energy(term: Energy | Callable[..., Tensor] | int) -> Energy:
    """Return an energy unchanged, and a function of (state, input) as a `FunctionEnergy`."""
    if isinstance(term, Energy):
        return term
    if callable(term):
        return FunctionEnergy(term)
    raise TypeError(
        f"cannot add {type(term).__name__} to an energy: "
        "use an Energy, or a function of (state, input) that returns one number per sample"
    )
