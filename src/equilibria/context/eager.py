"""Keeping the compiler out of what is no work for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def run_eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, without importing the compiler before anything is compiled.

    A solve is a loop that depends on the data, and the choice of a frequency is too: inside
    `torch.compile(model)` they run as they are, and what is around them is compiled.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper
