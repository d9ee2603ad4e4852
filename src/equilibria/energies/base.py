"""An energy term, and the sums and multiples that terms form."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from equilibria.context import (
    Context,
    Entry,
    Layout,
    State,
    batch_size,
    map_state,
    state_tensors,
    unflatten_state,
)
from equilibria.energies.bounds import Rounding, UnitBound
from equilibria.energies.local_gradients import gradients_of


class Energy(nn.Module):
    """A smooth term E(y; x) of a hidden objective G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x).

    A new term needs one method, `value`, written with ordinary torch operations. Its `descent` −∇E,
    which the fixed-point map y = σ(−∇E(y; x)) is made of, then comes from autograd. Parameters of
    the term are trained like those of any module. Override `inject` to compute what depends on the
    input once a solve, `prepare` for what depends on parameters only, and `descent` with a
    hand-written fast path (tests hold it equal to the gradient of `value`).

    Examples:
        >>> class Smoothness(eq.Energy):
        ...     def value(self, y, context):
        ...         return (y[:, 1:] - y[:, :-1]).square().sum(dim=1)
        >>> energy = eq.Input(torch.eye(3)) + Smoothness()
        >>> layer = eq.EquilibriumLayer(energy, activation="identity")
        >>> layer(torch.tensor([[0.0, 1.0, 0.0]])).round(decimals=2)
        tensor([[0.2900, 0.4300, 0.2900]], grad_fn=...)
    """

    couples_batch: bool = False
    """Whether the value of one sample depends on the others. The batch is then one problem for the
    solver, the adjoint and the status."""

    vanishes_at_zero: bool = False
    """Whether ∇E(0; x) = 0."""

    concave: bool = False
    """Whether E is known to be concave in y: the map σ(−∇E) is then monotone."""

    convex: bool = False
    """Whether E is known to be convex in y."""

    calibrates: bool = False
    """Whether the term fixes something at the first image T(0) of a solve (see `calibrate`)."""

    refresh_until: int = 0
    """For how many iterations `refresh` renews what the term then keeps fixed."""

    is_quadratic: bool = False
    """Whether ∇²E is the same matrix at every state and every input."""

    owns_descent: bool = False
    """Whether the tensors of `descent` are its own, so that they may be overwritten."""

    has_gradient: bool = True
    """Whether `descent` is −∇ of `value`. Not where a scale follows the state and is taken as
    constant: such a term is the energy of no map."""

    @property
    def name(self) -> str:
        """What the term is called in a sum: its class, in lower case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def formula(self) -> str:
        """The term as people write it."""
        return f"{type(self).__name__}(y; x)"

    def _keep_inputs(self, *inputs: Tensor) -> Context:
        """What the term needs of the input, once a solve. By default the input itself, as `x`.

        A layer with several inputs, given as a tuple, calls it with all of them; a term may take
        any number, `inject(self, image, graph)`.
        """
        return Context(sample={"x": inputs[0] if len(inputs) == 1 else inputs})

    inject: Callable[..., Context] = _keep_inputs

    def prepare(self, layout: Layout) -> Mapping[str, Entry]:
        """What the term needs of its parameters, once a solve; `layout`: the state's shapes."""
        return {}

    def complete(self, context: Context, layout: Layout) -> Context:
        """`context` with what `prepare` gives."""
        return context.with_shared(self.prepare(layout))

    def calibrate(self, image: State, context: Context) -> Context:
        """`context` with scales computed once a solve, at its first image T(0); in the graph."""
        return context

    def refresh(self, state: State, context: Context) -> Context:
        """`context` renewed at a state, for terms that freeze signs after some iterations."""
        return context

    def initial_state(self, context: Context) -> State | None:
        """A state of zeros, or None if the term does not say what shape the state has."""
        return None

    def first_descent(self, context: Context) -> State | None:
        """−∇E(0; x) where it costs nothing, else None: a solve then starts at its image."""
        return None

    def value(self, state: State, context: Context) -> Tensor:
        """E(y; x) of each sample, shape `(batch,)`; one number where the term couples the batch."""
        raise TypeError(
            f"{type(self).__name__} is an energy term without a `value` method: "
            "define value(self, state, context) and return one number per sample."
        )

    def descent(self, state: State, context: Context) -> State:
        """−∇E(y; x), by automatic differentiation of `value`."""

        def checked(tensors: tuple[Tensor, ...], context: Context) -> Tensor:
            value = self.value(unflatten_state(state, tensors), context)
            self._check(value, state)
            return value

        gradients = gradients_of(checked, state_tensors(state), context)
        return unflatten_state(state, (-gradient for gradient in gradients))

    @property
    def curvature_limit(self) -> float | None:
        """A bound of ‖∇²E‖ that holds by construction, without computing anything, or None."""
        return None

    @property
    def concavity_limit(self) -> float | None:
        """A bound of the eigenvalues of −∇²E that holds by construction, or None.

        Where it is at most 1/L_σ, the objective G is convex.
        """
        return 0.0 if self.convex else self.curvature_limit

    def curvature_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """An upper bound of ‖∇²E‖ over all states, or None if the term knows none.

        One number, or one for each sample where the bound depends on the input. Times the
        Lipschitz constant of σ it bounds the contraction factor of the map.
        """
        return None

    def concavity_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """An upper bound h of the eigenvalues of −∇²E over all states, or None.

        With L_σ ≤ 1 the objective G is (1 − h)-strongly convex.
        """
        return self.curvature_bound(context, layout)

    def input_bound(self, context: Context, layout: Layout) -> Tensor | None:
        """A bound of the Lipschitz constant of ∇E in the input, at any state and input, or None."""
        return None

    def unit_bounds(self, context: Context, layout: Layout) -> list[UnitBound] | None:
        """How strongly each unit of a quadratic energy is pulled, a bound a tensor of the state."""
        return None

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """How far a computed ∇E is from that of `exact`, the term in float64; None: not known.

        context: that of `exact`. unit: the unit roundoff of the type that this term computes in.
        """
        return None

    def _check(self, value: Tensor, state: State) -> None:
        expected = () if self.couples_batch else (batch_size(state),)
        if tuple(value.shape) != expected and not (self.couples_batch and value.numel() == 1):
            hint = "it couples the batch" if self.couples_batch else "one number per sample"
            raise ValueError(
                f"{type(self).__name__}.value returned shape {tuple(value.shape)}; "
                f"expected {expected} ({hint}). Sum over all dimensions but the first."
            )

    def __add__(self, other: Energy | Callable[..., Tensor]) -> Sum:
        return Sum(self, _as_energy(other))

    def __radd__(self, other: Energy | Callable[..., Tensor] | int) -> Energy:
        # `sum(terms)` starts from 0.
        if isinstance(other, int) and other == 0:
            return self
        return Sum(_as_energy(other), self)

    def __mul__(self, factor: float | Tensor) -> Scaled:
        return Scaled(self, factor)

    __rmul__ = __mul__

    def __neg__(self) -> Scaled:
        return Scaled(self, -1.0)

    def __sub__(self, other: Energy) -> Sum:
        return Sum(self, -_as_energy(other))


P = TypeVar("P")


class Composite(Energy):
    """Terms with names; what holds of all or any of them holds of the whole."""

    def __init__(self, terms: Mapping[str, Energy]) -> None:
        super().__init__()
        self.terms = nn.ModuleDict(terms)
        self.couples_batch = any(term.couples_batch for term in terms.values())
        self.vanishes_at_zero = all(term.vanishes_at_zero for term in terms.values())
        self.concave = all(term.concave for term in terms.values())
        self.convex = all(term.convex for term in terms.values())
        self.calibrates = any(term.calibrates for term in terms.values())
        self.refresh_until = max((term.refresh_until for term in terms.values()), default=0)
        self.is_quadratic = all(term.is_quadratic for term in terms.values())
        self.has_gradient = all(term.has_gradient for term in terms.values())

    def states(self, state: State) -> Sequence[State]:
        """What each term sees of the state."""
        return [state] * len(self.terms)

    def layouts(self, layout: Layout) -> Sequence[Layout]:
        """What each term sees of the state's shapes."""
        return [layout] * len(self.terms)

    def named_terms(self) -> list[tuple[str, Energy]]:
        return [(name, cast(Energy, term)) for name, term in self.terms.items()]

    def each(self, context: Context, pieces: Iterable[P]) -> list[tuple[Energy, Context, P]]:
        """Every term with its part of the context, and one of the pieces."""
        pairs = zip(self.named_terms(), pieces, strict=True)
        return [(term, context.parts[name], piece) for (name, term), piece in pairs]

    def _joined(self, parts: Iterable[Context]) -> Context:
        return Context(parts=dict(zip(self.terms, parts, strict=True)))

    def inject(self, *inputs: Tensor) -> Context:
        return self._joined(term.inject(*inputs) for _, term in self.named_terms())

    def complete(self, context: Context, layout: Layout) -> Context:
        each = self.each(context, self.layouts(layout))
        return self._joined(term.complete(part, own) for term, part, own in each)

    def calibrate(self, image: State, context: Context) -> Context:
        each = self.each(context, self.states(image))
        return self._joined(term.calibrate(own, part) for term, part, own in each)

    def refresh(self, state: State, context: Context) -> Context:
        each = self.each(context, self.states(state))
        return self._joined(term.refresh(own, part) for term, part, own in each)

    def value(self, state: State, context: Context) -> Tensor:
        """The sum of the terms' values: per sample, or one number where a term couples them."""
        each = self.each(context, self.states(state))
        values = [term.value(own, part) for term, part, own in each]
        if self.couples_batch:
            values = [value.sum() for value in values]
        return torch.stack(values).sum(dim=0)

    def _curvature_limits(self) -> list[float] | None:
        return all_known(term.curvature_limit for _, term in self.named_terms())

    def _concavity_limits(self) -> list[float] | None:
        return all_known(term.concavity_limit for _, term in self.named_terms())

    def _bounds(self, name: str, context: Context, layout: Layout) -> list[Tensor] | None:
        """What the terms' methods of this name say, unless one of them says nothing."""
        each = self.each(context, self.layouts(layout))
        return all_known(getattr(term, name)(part, own) for term, part, own in each)

    def _roundings(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> list[Rounding] | None:
        assert isinstance(exact, Composite)
        pairs = zip(self.named_terms(), exact.each(context, self.layouts(layout)), strict=True)
        known = [
            (name, term.rounding(meant, part, own, unit))
            for (name, term), (meant, part, own) in pairs
        ]
        return all_known(None if found is None else found.inside(name) for name, found in known)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        """`assign=True` makes a parameter of every entry: of those that terms share, one."""
        places: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            places.setdefault(parameter, []).append(name)
        for parameter, names in places.items():
            given = [state_dict[name] for name in names if name in state_dict]
            if metadata.get("assign_to_params_buffers") and len(names) > 1 and given:
                one = nn.Parameter(given[-1], requires_grad=parameter.requires_grad)
                state_dict.update(dict.fromkeys(names, one))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def _added(one: Tensor, other: Tensor, owned: tuple[bool, bool]) -> Tensor:
    """The sum, in the memory of one that is `owned` if no graph needs its value."""
    alike = one.stride() == other.stride() and one.dtype == other.dtype
    if torch.is_grad_enabled() or not alike or one.shape != other.shape or not any(owned):
        return one + other
    return torch.add(one, other, out=one if owned[0] else other)


def all_known(values: Iterable[P | None]) -> list[P] | None:
    """The values, unless one of them is None."""
    collected = list(values)
    known = [value for value in collected if value is not None]
    return known if len(known) == len(collected) else None


class Sum(Composite):
    """The sum of energy terms, each with a name: `energy["quadratic"]`.

    A term is called after its class or its function; the second of a kind gets a number. The
    context of the sum holds those of its terms under the same names.

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
            for name, one in term.named_terms() if isinstance(term, Sum) else [(term.name, term)]:
                flat[_unused(name, flat)] = one
        super().__init__({**flat, **named})
        self.owns_descent = len(self.terms) > 1

    def __getitem__(self, name: str) -> Energy:
        """The term called `name`."""
        if name not in self.terms:
            raise KeyError(f"the sum has no term {name!r}; it has {list(self.terms)}")
        return cast(Energy, self.terms[name])

    @property
    def formula(self) -> str:
        joined = " + ".join(term.formula for _, term in self.named_terms())
        return joined.replace("+ −", "− ")

    def initial_state(self, context: Context) -> State | None:
        starts = (term.initial_state(context.parts[name]) for name, term in self.named_terms())
        return next((start for start in starts if start is not None), None)

    def first_descent(self, context: Context) -> State | None:
        pulling = [name for name, term in self.named_terms() if not term.vanishes_at_zero]
        if len(pulling) != 1:
            return None
        return self[pulling[0]].first_descent(context.parts[pulling[0]])

    def descent(self, state: State, context: Context) -> State:
        if not self.terms:
            raise ValueError("a sum of energies needs at least one term")
        each = self.each(context, self.states(state))
        total, owned = each[0][0].descent(state, each[0][1]), each[0][0].owns_descent
        for term, part, _ in each[1:]:
            add = functools.partial(_added, owned=(owned, term.owns_descent))
            total, owned = map_state(add, total, term.descent(state, part)), True
        return unflatten_state(state, state_tensors(total))

    @property
    def curvature_limit(self) -> float | None:
        limits = self._curvature_limits()
        return None if limits is None else sum(limits)

    @property
    def concavity_limit(self) -> float | None:
        limits = self._concavity_limits()
        return None if limits is None else sum(limits)

    def curvature_bound(self, context: Context, layout: Layout) -> Tensor | None:
        return self._added("curvature_bound", context, layout)

    def concavity_bound(self, context: Context, layout: Layout) -> Tensor | None:
        return self._added("concavity_bound", context, layout)

    def input_bound(self, context: Context, layout: Layout) -> Tensor | None:
        return self._added("input_bound", context, layout)

    def _added(self, name: str, context: Context, layout: Layout) -> Tensor | None:
        bounds = self._bounds(name, context, layout)
        return None if bounds is None else functools.reduce(torch.add, bounds)

    def unit_bounds(self, context: Context, layout: Layout) -> list[UnitBound] | None:
        each = self.each(context, self.layouts(layout))
        known = all_known(term.unit_bounds(part, own) for term, part, own in each)
        if known is None:
            return None

        def joined(one: UnitBound, other: UnitBound) -> UnitBound:
            return UnitBound(one.input + other.input, torch.hypot(one.state, other.state))

        return [functools.reduce(joined, bounds) for bounds in zip(*known, strict=True)]

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        known = self._roundings(exact, context, layout, unit)
        return None if known is None else functools.reduce(operator.add, known)


def _unused(name: str, taken: Mapping[str, object]) -> str:
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(unused for unused in itertools.chain([name], numbered) if unused not in taken)


class Scaled(Energy):
    """A multiple of an energy term; the factor may be a trainable parameter.

    Examples:
        >>> term = 0.5 * eq.Input(torch.eye(2))
        >>> type(term).__name__, eq.EquilibriumLayer(term)(torch.ones(1, 2))
        ('Scaled', tensor([[0.5000, 0.5000]], grad_fn=...))
    """

    def __init__(self, term: Energy, factor: float | Tensor) -> None:
        super().__init__()
        if not isinstance(factor, int | float | Tensor):
            raise TypeError(f"an energy is multiplied by a number, not by {type(factor).__name__}")
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise ValueError(f"an energy is multiplied by one number, not by {factor.numel()}")
        self.term = term
        self.couples_batch = term.couples_batch
        self.vanishes_at_zero = term.vanishes_at_zero
        is_positive = not isinstance(factor, Tensor) and factor >= 0
        self.concave = term.concave and is_positive
        self.convex = term.convex and is_positive
        self.calibrates = term.calibrates
        self.refresh_until = term.refresh_until
        self.is_quadratic = term.is_quadratic
        self.has_gradient = term.has_gradient
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

    def inject(self, *inputs: Tensor) -> Context:
        return self.term.inject(*inputs)

    def complete(self, context: Context, layout: Layout) -> Context:
        return self.term.complete(context, layout)

    def calibrate(self, image: State, context: Context) -> Context:
        return self.term.calibrate(image, context)

    def refresh(self, state: State, context: Context) -> Context:
        return self.term.refresh(state, context)

    def initial_state(self, context: Context) -> State | None:
        return self.term.initial_state(context)

    def value(self, state: State, context: Context) -> Tensor:
        return self.factor * self.term.value(state, context)

    def descent(self, state: State, context: Context) -> State:
        descent = self.term.descent(state, context)
        return map_state(lambda tensor: tensor * self.factor, descent)

    @property
    def curvature_limit(self) -> float | None:
        limit = self.term.curvature_limit
        # A trainable factor is a number on some device: reading it would not be for nothing.
        if limit is None or isinstance(self.factor, Tensor):
            return None
        return abs(self.factor) * limit

    @property
    def concavity_limit(self) -> float | None:
        if self.convex:
            return 0.0
        if isinstance(self.factor, Tensor) or self.factor < 0:
            return self.curvature_limit
        limit = self.term.concavity_limit
        return None if limit is None else self.factor * limit

    def curvature_bound(self, context: Context, layout: Layout) -> Tensor | None:
        bound = self.term.curvature_bound(context, layout)
        return None if bound is None else (self.factor * bound).abs()

    def concavity_bound(self, context: Context, layout: Layout) -> Tensor | None:
        if not self.factor >= 0:
            return self.curvature_bound(context, layout)
        bound = self.term.concavity_bound(context, layout)
        return None if bound is None else self.factor * bound

    def input_bound(self, context: Context, layout: Layout) -> Tensor | None:
        bound = self.term.input_bound(context, layout)
        return None if bound is None else (self.factor * bound).abs()

    def unit_bounds(self, context: Context, layout: Layout) -> list[UnitBound] | None:
        known = self.term.unit_bounds(context, layout)
        factor = float(self.factor)
        if known is None or factor < 0:
            return None
        return [UnitBound(factor * one.input, math.sqrt(factor) * one.state) for one in known]

    def rounding(
        self, exact: Energy, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        assert isinstance(exact, Scaled)
        inner = self.term.rounding(exact.term, context, layout, unit)
        size = exact.term.curvature_bound(context, layout)
        if inner is None or size is None:
            return None
        # The factor itself may be rounded (1/μ), and the product with it is.
        own = Rounding(state=4 * unit * float(size), injected=4 * unit)
        return (inner + own) * abs(float(self.factor))


class FunctionEnergy(Energy):
    """The term E(y; x) = function(y, x), where the function returns one number per sample.

    In a layer with several inputs the function takes them all: function(y, image, graph).

    convex: that the function is convex in y; a solve then does not test whether it has found a
        minimum.

    Examples:
        >>> term = eq.energies.FunctionEnergy(lambda y, x: 0.5 * (y - x).square().sum(dim=1))
        >>> eq.EquilibriumLayer(term, activation="identity")(torch.ones(1, 2)).round(decimals=2)
        tensor([[0.5000, 0.5000]])
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        *,
        couples_batch: bool = False,
        convex: bool = False,
    ) -> None:
        super().__init__()
        self.function = function
        self.convex = convex
        self.couples_batch = couples_batch

    @property
    def name(self) -> str:
        name = getattr(self.function, "__name__", "function")
        return name if name.isidentifier() else "function"  # "<lambda>" is no name

    @property
    def formula(self) -> str:
        return f"{getattr(self.function, '__name__', 'function')}(y, x)"

    def value(self, state: State, context: Context) -> Tensor:
        return self.function(state, *context.several("x"))

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


@overload
def energy_term(
    function: Callable[..., Tensor], *, couples_batch: bool = False, convex: bool = False
) -> FunctionEnergy: ...


@overload
def energy_term(
    function: None = None, *, couples_batch: bool = False, convex: bool = False
) -> Callable[[Callable[..., Tensor]], FunctionEnergy]: ...


def energy_term(
    function: Callable[..., Tensor] | None = None,
    *,
    couples_batch: bool = False,
    convex: bool = False,
) -> FunctionEnergy | Callable[[Callable[..., Tensor]], FunctionEnergy]:
    """Turn a function of (state, input) into an energy term, also as a decorator.

    Args:
        function: Returns one number per sample, E(y; x).
        couples_batch: Whether the samples of a batch depend on each other; the function then
            returns one number.
        convex: Whether the function is convex in y. A solve then need not test whether it has found
            a minimum; without this, the test costs a few products with the Hessian per solve.

    Returns:
        The term, which adds to others and is multiplied by numbers.

    Examples:
        >>> @eq.energy_term
        ... def pull(y, x):
        ...     return 0.5 * (y - 1).square().sum(dim=1)
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)) + 0.5 * pull)
        >>> layer(torch.ones(1, 2)).round(decimals=2)
        tensor([[1., 1.]], grad_fn=...)
    """
    if function is None:
        return lambda wrapped: energy_term(wrapped, couples_batch=couples_batch, convex=convex)
    return FunctionEnergy(function, couples_batch=couples_batch, convex=convex)


@torch.no_grad()
def curvature(term: Energy, state: State, context: Context, steps: int = 12) -> float:
    """About the largest eigenvalue of ∇²E over the samples at a state, by absolute value.

    By `steps` of power iteration, which come close from below; 0 where nothing finite is found.

    Examples:
        >>> term, y = eq.Quadratic(0.5 * torch.eye(2)), torch.ones(1, 2)
        >>> context = eq.EnergyCell(term).inject(y)
        >>> round(eq.energies.curvature(term, y, context), 3)
        -0.25
    """
    generator = torch.Generator().manual_seed(0)
    tensors = state_tensors(state)
    vectors = [torch.randn(t.shape, generator=generator).to(t) for t in tensors]
    eigenvalue = 0.0
    for _ in range(steps):
        # The Hessian times v is the gradient of ⟨v, ∇E⟩.
        def along(states: tuple[Tensor, ...], context: Context, v: Any = vectors) -> Tensor:
            descent = state_tensors(term.descent(unflatten_state(state, states), context))
            return -torch.stack([(a * b).sum() for a, b in zip(v, descent, strict=True)]).sum()

        products = gradients_of(along, tensors, context)
        norm = float(torch.stack([p.square().sum() for p in products]).sum().sqrt())
        if not 0 < norm < math.inf:
            return 0.0
        agreement = [(v * p).sum() for v, p in zip(vectors, products, strict=True)]
        eigenvalue = math.copysign(norm, float(torch.stack(agreement).sum()))
        vectors = [p / norm for p in products]
    return eigenvalue


def _as_energy(term: Energy | Callable[..., Tensor] | int) -> Energy:
    if isinstance(term, Energy):
        return term
    if callable(term):
        return FunctionEnergy(term)
    raise TypeError(
        f"cannot add {type(term).__name__} to an energy: "
        "give an Energy, or a function of (state, input) that returns one number per sample"
    )
