"""Things that users choose by name: activations, solvers, gradient rules, models."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar, overload

from equilibria.plugins import load_installed

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Factories by name. A wrong name or option is an error that says what would be right."""

    def __init__(
        self,
        kind: str,
        type_: type[T] | None = None,
        factories: Mapping[str, Callable[..., T]] | None = None,
    ) -> None:
        self.kind = kind
        self.type = type_
        self._factories = dict(factories or {})

    @overload
    def register(self, name: str, factory: F, *, replace: bool = False) -> F: ...

    @overload
    def register(self, name: str, *, replace: bool = False) -> Callable[[F], F]: ...

    def register(
        self, name: str, factory: Callable[..., T] | None = None, *, replace: bool = False
    ) -> Any:
        """Make a thing available by name; `factory` takes its options as keywords.

        Without a factory this is a decorator of one.

        Examples:
            >>> @eq.solvers.register_solver("patient")
            ... def patient():
            ...     return eq.Picard(max_iterations=500)
            >>> eq.solvers.get_solver("patient").max_iterations
            500
        """
        if factory is None:
            return functools.partial(self.register, name, replace=replace)
        if name in self._factories and not replace:
            raise ValueError(
                f"the {self.kind} {name!r} exists already; choose another name, "
                "or pass replace=True to take its place"
            )
        self._factories[name] = factory
        return factory

    def names(self) -> list[str]:
        """The names there are, sorted, those of installed plugins among them.

        Examples:
            >>> eq.gradients.list_gradients()
            ['auto', 'implicit', 'one_step', 'phantom', 'unrolled']
        """
        load_installed()
        return sorted(self._factories)

    def factory(self, name: str) -> Callable[..., T]:
        if name not in self._factories:
            known = self.names()
            if name not in known:
                near = nearest(name, known, count=3, cutoff=0.4)
                raise ValueError(
                    f"unknown {self.kind} {name!r}{near} There are: {', '.join(known)}."
                )
        return self._factories[name]

    def create(self, name: str, **options: Any) -> T:
        """What `name` stands for, made with `options`.

        Examples:
            >>> eq.tasks.create_task("classification", label_smoothing=0.1)
            Classification(label_smoothing=0.1)
        """
        factory = self.factory(name)
        check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except TypeError as error:
            raise TypeError(f"{self.kind} {name!r}: {error}") from error

    def resolve(self, choice: str | Mapping[str, Any] | T, **options: Any) -> T:
        """What `choice` names, made with `options`; an object passes through and takes none.

        A mapping holds a name and options, as recipes write it: `{name: anderson, memory: 5}`.

        Examples:
            >>> eq.solvers.get_solver("anderson", memory=3).memory
            3
            >>> eq.activations.get_activation({"name": "leaky_relu", "slope": 0.2})
            LeakyReLU(slope=0.2)
        """
        if isinstance(choice, Mapping):
            given = dict(choice)
            if "name" not in given:
                raise ValueError(f"a {self.kind} needs a name, e.g. {{name: …}}, not {given}")
            return self.create(given.pop("name"), **{**given, **options})
        if isinstance(choice, str):
            return self.create(choice, **options)
        if self.type is not None and not isinstance(choice, self.type):
            raise TypeError(
                f"{self.kind}: give a name or an object of {self.type.__name__}, not {choice!r}; "
                f"names: {', '.join(self.names())}"
            )
        if options:
            raise TypeError(
                f"{', '.join(sorted(options))} given beside the {self.kind} {choice!r}, which has "
                "its own: set them there"
            )
        return choice


def nearest(name: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """The words "; did you mean …?" for a name that is not known, or a full stop."""
    near = difflib.get_close_matches(str(name), list(known), n=count, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def check_options(
    what: str, factory: Callable[..., Any], options: Iterable[str], also: Iterable[str] = ()
) -> None:
    """Refuse an option that neither the factory nor `also` has, naming the nearest one."""
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = dict.fromkeys([*parameters, *also])
    for option in options:
        if option not in known:
            has = ", ".join(known) or "none"
            raise TypeError(
                f"{what} has no option {option!r}{nearest(option, known)} It has: {has}."
            )


def _check(
    required: str,
    holds: Callable[[float], bool],
    values: Mapping[str, float | None],
    hint: Callable[[float], str] = lambda value: "",
) -> None:
    for name, value in values.items():
        if value is not None and not holds(value):
            shown = int(value) if isinstance(value, float) and value.is_integer() else value
            raise ValueError(f"{name} must {required}, got {shown}{hint(value)}")


def gray_levels_hint(value: float) -> str:
    """Return the words "Did you mean 25/255 = 0.098?" for a number of gray levels, or ""."""
    is_likely = 1 < value <= 255
    return f". Did you mean {value:g}/255 = {value / 255:.2g}?" if is_likely else ""


def _percent_hint(value: float) -> str:
    # Slightly above 1 is more likely a mistake of another kind.
    return f". Did you mean {value:g}% = {value / 100:g}?" if 5 <= value <= 100 else ""


def _exponent_hint(value: float) -> str:
    is_likely = -16 <= value <= -1 and value == int(value)
    return f". Did you mean 1e{value:g}?" if is_likely else ""


def check_positive(**values: float | None) -> None:
    """Refuse numbers that are not positive and finite; None is in range, here and below."""
    _check("be positive and finite", lambda value: 0 < value < math.inf, values)


def check_not_negative(**values: float | None) -> None:
    """Raise `ValueError` for numbers that are negative or infinite."""
    _check("not be negative or infinite", lambda value: 0 <= value < math.inf, values)


def check_at_least(least: float, **values: float | None) -> None:
    """Refuse numbers below `least`."""
    _check(f"be at least {least}", lambda value: value >= least, values)


def check_at_least_one(**values: float | None) -> None:
    """Raise `ValueError` for numbers below 1."""
    check_at_least(1, **values)


def check_above_one(**values: float | None) -> None:
    """Refuse numbers that are not above 1; infinity is."""
    _check("be above 1", lambda value: value > 1, values)


def check_share(**values: float | None) -> None:
    """Refuse numbers outside (0, 1]."""
    _check("be in (0, 1]", lambda value: 0 < value <= 1, values, _percent_hint)


def check_below_one(**values: float | None) -> None:
    """Refuse numbers outside [0, 1)."""
    _check("be in [0, 1)", lambda value: 0 <= value < 1, values, _percent_hint)


def check_fraction(**values: float | None) -> None:
    """Refuse numbers outside [0, 1]."""
    _check("be in [0, 1]", lambda value: 0 <= value <= 1, values, _percent_hint)


def check_open_share(**values: float | None) -> None:
    """Refuse numbers outside (0, 1)."""
    _check("be in (0, 1)", lambda value: 0 < value < 1, values, _percent_hint)


def check_pixels(**values: float | None) -> None:
    """Refuse numbers outside [0, 1] where pixels have values in [0, 1], such as a noise level."""
    required = "be in [0, 1] (a fraction of the pixel range)"
    _check(required, lambda value: 0 <= value <= 1, values, gray_levels_hint)


def check_positive_pixels(**values: float | None) -> None:
    """Refuse what `check_pixels` refuses, and zero."""
    required = "be in (0, 1] (a fraction of the pixel range)"
    _check(required, lambda value: 0 < value <= 1, values, gray_levels_hint)


def check_tolerances(**values: float | None) -> None:
    """Refuse relative residuals outside (0, 1). A solve that starts at zero begins with 1."""
    required = "be in (0, 1) (a relative residual)"
    _check(required, lambda value: 0 < value < 1, values, _exponent_hint)


def check_choice(known: Iterable[str | None], **values: str | None) -> None:
    """Refuse what is not among the known choices, of which None may be one."""
    choices = list(known)
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def check_values(
    settings: object,
    *,
    at_least_one: Sequence[str] = (),
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    below_one: Sequence[str] = (),
    fraction: Sequence[str] = (),
    pixels: Sequence[str] = (),
    positive_pixels: Sequence[str] = (),
    tolerances: Sequence[str] = (),
    one_of: Mapping[str, Iterable[str | None]] = MappingProxyType({}),
) -> None:
    """The checks above, of attributes given by name."""
    for check, names in (
        (check_at_least_one, at_least_one),
        (check_positive, positive),
        (check_not_negative, not_negative),
        (check_below_one, below_one),
        (check_fraction, fraction),
        (check_pixels, pixels),
        (check_positive_pixels, positive_pixels),
        (check_tolerances, tolerances),
    ):
        check(**{name: getattr(settings, name) for name in names})
    for name, choices in one_of.items():
        check_choice(choices, **{name: getattr(settings, name)})
