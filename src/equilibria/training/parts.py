"""Recipes hold names; a model is made of objects. This is the way from the first to the second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equilibria.energies import HSIC, L1, L2, Decorrelation, Incay, Regularizer
from equilibria.gradients import get_gradient
from equilibria.registry import Registry
from equilibria.solvers import SAM, Solver, get_solver

_regularizers: Registry[Regularizer] = Registry("regularizer")
_regularizers.register("l1", L1)
_regularizers.register("l2", L2)
_regularizers.register("incay", Incay)
_regularizers.register("decorrelation", Decorrelation)
_regularizers.register("hsic", HSIC)


def with_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model with objects in the place of `{"name": …, option: …}`.

    That is how a recipe writes a gradient rule, a solver or a regularizer with options of its own:
    `gradient: {name: unrolled, steps: 20}`.
    """
    return {name: _part(name, value) for name, value in options.items()}


def _part(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if name in ("regularizer", "gradient", "solver") and "name" not in value:
        raise ValueError(f"model.options.{name} needs a name, e.g. {{name: …}}, not {dict(value)}")
    options = {key: item for key, item in value.items() if key != "name"}
    if name == "regularizer":
        return _regularizers.create(value["name"], **options)
    if name == "gradient":
        return get_gradient(value["name"], **options)
    if name == "solver":
        return _solver(value["name"], options)
    return value


def _solver(name: str, options: dict[str, Any]) -> Solver[Any]:
    if name != "sam":
        return get_solver(name, **options)
    return SAM(**{key: _part(key, value) for key, value in options.items()})
