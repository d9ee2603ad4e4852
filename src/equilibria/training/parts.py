"""Recipes hold names; a model is made of objects. This is the way from the first to the second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equilibria.adjoints import get_adjoint
from equilibria.energies import HSIC, L1, L2, Decorrelation, Incay, Regulariser
from equilibria.registry import Registry
from equilibria.solvers import SAM, Solver, get_solver

_regularisers: Registry[Regulariser] = Registry("regulariser")
_regularisers.register("l1", L1)
_regularisers.register("l2", L2)
_regularisers.register("incay", Incay)
_regularisers.register("decorrelation", Decorrelation)
_regularisers.register("hsic", HSIC)


def with_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model with objects in the place of `{"name": …, option: …}`.

    That is how a recipe writes a gradient rule, a solver or a regulariser with options of its own:
    `adjoint: {name: unrolled, steps: 20}`.
    """
    return {name: _part(name, value) for name, value in options.items()}


def _part(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if name in ("regulariser", "adjoint", "solver") and "name" not in value:
        raise ValueError(f"model.options.{name} needs a name, e.g. {{name: …}}, not {dict(value)}")
    options = {key: item for key, item in value.items() if key != "name"}
    if name == "regulariser":
        return _regularisers.create(value["name"], **options)
    if name == "adjoint":
        return get_adjoint(value["name"], **options)
    if name == "solver":
        return _solver(value["name"], options)
    return value


def _solver(name: str, options: dict[str, Any]) -> Solver[Any]:
    if name != "sam":
        return get_solver(name, **options)
    return SAM(**{key: _part(key, value) for key, value in options.items()})
