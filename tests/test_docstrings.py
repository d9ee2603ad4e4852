"""Docstrings of public names: methods have one, and parameters are documented."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import equilibria

ROOMS = [room.name for room in pkgutil.iter_modules(equilibria.__path__) if room.name != "__main__"]
PACKAGES = ["equilibria", *(f"equilibria.{room}" for room in (*ROOMS, "papers.theory"))]
"""Packages whose `__all__` is public."""

SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]+.*(?:\n|\Z)|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^\n]*\))?:", re.MULTILINE)


def public_objects() -> dict[str, object]:
    """Return public classes and functions of the project, each under its first name."""
    objects: dict[int, tuple[str, object]] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", []):
            value = getattr(module, name)
            is_code = inspect.isclass(value) or inspect.isfunction(value)
            if is_code and value.__module__.startswith("equilibria"):
                objects.setdefault(id(value), (f"{package}.{name}", value))
    return dict(objects.values())


def own_members(kind: type) -> Iterator[tuple[str, object]]:
    """Yield the public methods and properties that a class itself defines."""
    for name, value in vars(kind).items():
        is_member = inspect.isroutine(value) or isinstance(
            value, property | cached_property | classmethod | staticmethod
        )
        # A default of a dataclass field is a value, not a method.
        if is_member and not name.startswith("_") and name not in inspect.get_annotations(kind):
            yield name, value


def has_docstring(kind: type, name: str, value: object) -> bool:
    """Whether a member has a docstring, possibly inherited from a base class."""
    bases = (vars(base).get(name) for base in kind.__mro__[1:])
    return any(inspect.getdoc(member) for member in (value, *bases) if member is not None)


def documented_parameters(text: str) -> set[str]:
    """Return the names in the sections `Args:` and `Attributes:` of a docstring."""
    sections = "".join(body for _, body in SECTION.findall(text))
    return {name.strip("* ") for names in ENTRY.findall(sections) for name in names.split(",")}


def parameters(value: Any) -> list[str]:
    """Return the names of the parameters that users pass."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return []
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if inspect.isclass(value):
        if issubclass(value, tuple):
            return [*getattr(value, "_fields", ())]
        if not str(getattr(value.__init__, "__module__", "")).startswith("equilibria"):
            return []  # PyTorch's, or that of a protocol or an enumeration
    signature = inspect.signature(value)
    return [name for name in signature.parameters if not name.startswith("_")]


def undocumented_parameters() -> dict[str, list[str]]:
    """Return the undocumented parameters of every public object that has some."""
    missing, public = {}, public_objects()
    for name, value in public.items():
        text = inspect.cleandoc(value.__doc__ or "")
        if inspect.isclass(value):
            text += "\n\n" + inspect.cleandoc(vars(value).get("__init__", value).__doc__ or "")
        if dataclasses.is_dataclass(value):
            # A dataclass with the fields of another public one leaves their description there.
            bases = (base for base in value.__bases__ if base in public.values())
            text += "\n\n" + "\n\n".join(inspect.cleandoc(base.__doc__ or "") for base in bases)
        documented = documented_parameters(text)
        if undocumented := [p for p in parameters(value) if p not in documented]:
            missing[name] = undocumented
    return missing


def test_public_methods_and_properties_have_a_docstring() -> None:
    undocumented = {
        f"{value.__module__}.{value.__qualname__}.{name}"
        for value in public_objects().values()
        if inspect.isclass(value)
        for name, member in own_members(value)
        if not has_docstring(value, name, member)
    }
    assert undocumented == set()


def test_parameters_are_documented() -> None:
    missing = undocumented_parameters()
    lines = "\n".join(f"{name}: {', '.join(names)}" for name, names in missing.items())
    assert not missing, (
        "these parameters have no entry in `Args:` (or, in a dataclass, `Attributes:`):\n" + lines
    )


def test_entries_of_args_are_recognized() -> None:
    text = "Summary.\n\nArgs:\n    x: Inputs,\n        shape: none.\n    a, b: Two.\n"
    text += "    *rest: All.\n    name (str): Typed.\n\nReturns:\n    y: Not a parameter.\n"
    assert documented_parameters(text) == {"x", "a", "b", "rest", "name"}
    assert documented_parameters("Summary.\n\n    x: no section.") == set()
