"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from equilibria.activations.base import Activation
from equilibria.registry import Registry

A = TypeVar("A", bound=Activation)

_ACTIVATIONS: Registry[Activation] = Registry("activation", Activation)


@overload
def register_activation(target: type[A], *, replace: bool = False) -> type[A]: ...


@overload
def register_activation(
    target: str | None = None, *, replace: bool = False
) -> Callable[[type[A]], type[A]]: ...


def register_activation(
    target: type[A] | str | None = None, *, replace: bool = False
) -> type[A] | Callable[[type[A]], type[A]]:
    """Make an activation class available by name: a decorator, with or without arguments.

    The name is the class's own `name`; one given here becomes the class's `name` if it has none.
    A name that is taken is an error unless `replace` is true.
    """
    if isinstance(target, type):
        return _register(target, None, replace)
    return lambda cls: _register(cls, target, replace)


def get_activation(activation: str | Activation, **options: Any) -> Activation:
    """The activation called `activation`, made with `options`; an instance passes through."""
    return _ACTIVATIONS.resolve(activation, **options)


def list_activations() -> list[str]:
    """The names of all registered activations, sorted."""
    return _ACTIVATIONS.names()


def _register(cls: type[A], name: str | None, replace: bool) -> type[A]:
    own: str | None = getattr(cls, "name", None)
    if name is not None and own is not None and name != own:
        raise ValueError(f"{cls.__name__} is called {own!r}: it cannot be registered as {name!r}")
    key = name or own
    if key is None:
        raise ValueError(f"{cls.__name__} needs a name: set the class attribute `name`")
    _ACTIVATIONS.register(key, cls, replace=replace)
    cls.name = key
    return cls
