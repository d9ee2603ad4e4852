"""Things that users choose by name: activations, solvers, gradient rules, models."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Factories by name. A wrong name or option is an error that says what would be right."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., T]] = {}

    def register(self, name: str, factory: Callable[..., T], *, replace: bool = False) -> None:
        if name in self._factories and not replace:
            raise ValueError(
                f"the {self.kind} {name!r} exists already; choose another name, "
                "or pass replace=True to take its place"
            )
        self._factories[name] = factory

    def names(self) -> list[str]:
        return sorted(self._factories)

    def factory(self, name: str) -> Callable[..., T]:
        try:
            return self._factories[name]
        except KeyError:
            raise ValueError(self._unknown(name)) from None

    def create(self, name: str, **options: Any) -> T:
        factory = self.factory(name)
        self._check_options(name, factory, options)
        try:
            return factory(**options)
        except TypeError as error:
            raise TypeError(f"{self.kind} {name!r}: {error}") from error

    def _check_options(self, name: str, factory: Callable[..., T], options: Iterable[str]) -> None:
        parameters = inspect.signature(factory).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        for option in options:
            if option not in parameters:
                near = difflib.get_close_matches(option, parameters, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                known = ", ".join(parameters) or "none"
                raise TypeError(
                    f"{self.kind} {name!r} has no option {option!r}{hint} It has: {known}."
                )

    def _unknown(self, name: object) -> str:
        near = difflib.get_close_matches(str(name), self.names(), n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"unknown {self.kind} {name!r}{hint} There are: {', '.join(self.names())}."
