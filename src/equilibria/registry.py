"""Registries of objects by name, such as solvers and models; checks of option values and names."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar, overload

from equilibria.plugins import load_installed

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move the cursor, change colors or text direction, or cannot be encoded."""


class Registry(Generic[T]):
    """Factories by name; an unknown name or option raises an error with suggestions.

    Args:
        kind: Kind of the objects for messages, such as "solver".
        type_: Base class of the objects, if they have one.
        factories: Initial factories by name.
    """

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
        """Register a factory by name.

        Args:
            name: Name of the factory.
            factory: Creates an object from options, given as keywords. Without it, `register` is a
                decorator.
            replace: Whether to replace a factory of the same name.

        Returns:
            The factory, or a decorator.

        Raises:
            ValueError: If the name is taken.

        Examples:
            >>> @eq.solvers.register_solver("long-picard")
            ... def long_picard():
            ...     return eq.Picard(max_iterations=500)
            >>> eq.solvers.get_solver("long-picard").max_iterations
            500
        """
        if factory is None:
            return functools.partial(self.register, name, replace=replace)
        if name in self._factories and not replace:
            raise ValueError(
                f"the {self.kind} {name!r} exists already: choose another name, or pass "
                "replace=True to replace it"
            )
        self._factories[name] = factory
        return factory

    def names(self) -> list[str]:
        """Return all names, sorted, including those of installed plugins.

        Examples:
            >>> eq.gradients.list_gradients()
            ['auto', 'implicit', 'one_step', 'phantom', 'unrolled']
        """
        load_installed()
        return sorted(self._factories)

    def factory(self, name: str) -> Callable[..., T]:
        """Return the factory of a name.

        Args:
            name: Name of the factory.

        Raises:
            ValueError: If the name is unknown.
        """
        if name not in self._factories:
            known = self.names()
            if name not in known:
                near = nearest(name, known, count=3, cutoff=0.4)
                raise ValueError(
                    f"unknown {self.kind} {name!r}{near} Available: {', '.join(known)}."
                )
        return self._factories[name]

    def create(self, name: str, **options: Any) -> T:
        """Create an object by name.

        Args:
            name: Name of the factory.
            options: Options of the factory.

        Raises:
            ValueError: If the name is unknown, or a value of an option is not valid.
            TypeError: If an option is unknown or missing.

        Examples:
            >>> eq.tasks.create_task("classification", label_smoothing=0.1)
            Classification(label_smoothing=0.1)
        """
        factory = self.factory(name)
        if options:  # reading a signature takes longer than creating most objects
            check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except TypeError as error:
            raise TypeError(f"{self.kind} {name!r}: {error}") from error

    def resolve(self, choice: str | Mapping[str, Any] | T, **options: Any) -> T:
        """Create an object from a choice, or return it if it is an object already.

        Args:
            choice: A name, a mapping of a name and options as in recipes
                (`{name: anderson, memory: 5}`), or an object.
            options: Options for a choice by name.

        Raises:
            ValueError: If the name is unknown, or a value of an option is not valid.
            TypeError: If an option is unknown, or options are combined with an object.

        Examples:
            >>> eq.solvers.get_solver("anderson", memory=3).memory
            3
            >>> eq.activations.get_activation({"name": "leaky_relu", "slope": 0.2})
            LeakyReLU(slope=0.2)
        """
        if isinstance(choice, Mapping):
            entries = dict(choice)
            if "name" not in entries:
                raise ValueError(f"{self.kind} needs a name, {{name: …}}, got {entries}")
            return self.create(entries.pop("name"), **{**entries, **options})
        if isinstance(choice, str):
            return self.create(choice, **options)
        if self.type is not None and not isinstance(choice, self.type):
            raise TypeError(
                f"{self.kind} must be a name or an instance of {self.type.__name__}, got "
                f"{choice!r}. "
                f"Available: {', '.join(self.names())}."
            )
        if options:
            raise TypeError(
                f"the options {', '.join(sorted(options))} cannot be combined with the {self.kind} "
                f"{choice!r}: set them on that object"
            )
        return choice


def printable(text: str) -> str:
    """Return a text with control characters escaped as in JSON; file names can contain them."""
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def nearest(name: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean …?" with the most similar known names, or a full stop.

    Args:
        name: Unknown name.
        known: Known names.
        count: Largest number of suggestions.
        cutoff: Smallest similarity of a suggestion, in [0, 1].
    """
    near = difflib.get_close_matches(str(name), list(known), n=count, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def check_options(
    what: str, factory: Callable[..., Any], options: Iterable[str], also: Iterable[str] = ()
) -> None:
    """Raise `TypeError` for an unknown option, with a suggestion.

    Args:
        what: Description of the object for the message.
        factory: Function whose parameters are the options.
        options: Names of the options to check.
        also: Names of further valid options.
    """
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = dict.fromkeys([*parameters, *also])
    for option in options:
        if option not in known:
            names = ", ".join(known) or "none"
            raise TypeError(
                f"{what} has no option {option!r}{nearest(option, known)} Options: {names}."
            )


def _check(
    requirement: str,
    is_valid: Callable[[float], bool],
    values: Mapping[str, float | None],
    hint: Callable[[float], str] = lambda value: "",
) -> None:
    """Raise `ValueError` for the first value that is neither None nor valid."""
    for name, value in values.items():
        if value is not None and not is_valid(value):
            shown = int(value) if isinstance(value, float) and value.is_integer() else value
            raise ValueError(f"{name} must {requirement}, got {shown}{hint(value)}")


def gray_levels_hint(value: float) -> str:
    """Return ". Did you mean 25/255 = 0.098?" for a number of gray levels, else an empty string."""
    is_likely = 1 < value <= 255
    return f". Did you mean {value:g}/255 = {value / 255:.2g}?" if is_likely else ""


def _percent_hint(value: float) -> str:
    # A value slightly above 1 is probably not a percentage.
    return f". Did you mean {value:g}% = {value / 100:g}?" if 5 <= value <= 100 else ""


def _exponent_hint(value: float) -> str:
    is_likely = -16 <= value <= -1 and value == int(value)
    return f". Did you mean 1e{value:g}?" if is_likely else ""


def check_positive(**values: float | None) -> None:
    """Raise `ValueError` for numbers that are not positive and finite; None is always valid."""
    _check("be positive and finite", lambda value: 0 < value < math.inf, values)


def check_not_negative(**values: float | None) -> None:
    """Raise `ValueError` for numbers that are negative or infinite."""
    _check("not be negative or infinite", lambda value: 0 <= value < math.inf, values)


def check_at_least(least: float, **values: float | None) -> None:
    """Raise `ValueError` for numbers below `least`."""
    _check(f"be at least {least}", lambda value: value >= least, values)


def check_at_least_one(**values: float | None) -> None:
    """Raise `ValueError` for numbers below 1."""
    check_at_least(1, **values)


def check_above_one(**values: float | None) -> None:
    """Raise `ValueError` for numbers that are not above 1; infinity is valid."""
    _check("be above 1", lambda value: value > 1, values)


def check_share(**values: float | None) -> None:
    """Raise `ValueError` for numbers outside (0, 1]."""
    _check("be in (0, 1]", lambda value: 0 < value <= 1, values, _percent_hint)


def check_below_one(**values: float | None) -> None:
    """Raise `ValueError` for numbers outside [0, 1)."""
    _check("be in [0, 1)", lambda value: 0 <= value < 1, values, _percent_hint)


def check_fraction(**values: float | None) -> None:
    """Raise `ValueError` for numbers outside [0, 1]."""
    _check("be in [0, 1]", lambda value: 0 <= value <= 1, values, _percent_hint)


def check_open_share(**values: float | None) -> None:
    """Raise `ValueError` for numbers outside (0, 1)."""
    _check("be in (0, 1)", lambda value: 0 < value < 1, values, _percent_hint)


def check_pixels(**values: float | None) -> None:
    """Raise `ValueError` for pixel differences, such as a noise level, outside [0, 1]."""
    requirement = "be in [0, 1] (a fraction of the pixel range)"
    _check(requirement, lambda value: 0 <= value <= 1, values, gray_levels_hint)


def check_positive_pixels(**values: float | None) -> None:
    """Raise `ValueError` for pixel differences outside (0, 1]."""
    requirement = "be in (0, 1] (a fraction of the pixel range)"
    _check(requirement, lambda value: 0 < value <= 1, values, gray_levels_hint)


def check_tolerances(**values: float | None) -> None:
    """Raise `ValueError` for relative residuals outside (0, 1); it is 1 at a start at zero."""
    requirement = "be in (0, 1) (a relative residual)"
    _check(requirement, lambda value: 0 < value < 1, values, _exponent_hint)


def check_choice(known: Iterable[str | None], **values: str | None) -> None:
    """Raise `ValueError` for values that are not among the known choices.

    Args:
        known: Valid choices; None is valid only if it is one of them.
        values: Values by the name of the option.
    """
    choices = list(known)
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


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
    """Apply the checks above to attributes of `settings`, given by name for each check."""
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
