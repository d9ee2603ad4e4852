"""The width at which a network has a given number of parameters."""

from __future__ import annotations

from collections.abc import Callable


def nearest_width(count: Callable[[int], int], parameters: int, *, remedy: str) -> int:
    """The width whose growing `count` is nearest to `parameters`.

    remedy: what to do where even the narrowest network is too large, for the error.
    """
    if count(1) > parameters:
        raise ValueError(
            f"the smallest network of this form has {count(1)} parameters, more than the "
            f"{parameters} asked for: {remedy}"
        )
    upper = 2
    while count(upper) < parameters:
        upper *= 2
    lower = upper // 2
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if count(middle) < parameters:
            lower = middle
        else:
            upper = middle
    return min((lower, upper), key=lambda width: abs(count(width) - parameters))
