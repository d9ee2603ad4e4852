"""Optional capabilities of energy terms beyond `Energy`.

Each capability has a protocol and a function. A term implements the method of the protocol. Callers
use the function, which returns a correct default for terms without the method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies.rounding import Rounding

if TYPE_CHECKING:
    from equilibria.energies.base import Energy


class Calibrating(Protocol):
    """Term that computes scales once per solve, from T(0); also set `Facts.calibrates`."""

    def calibrate(self, image: State, context: Context) -> Context:
        """Add scales of the term, which depend on the first step of a solve, to `context`.

        The scales are part of the autograd graph.

        Args:
            image: T(0), the map at the zero state.
            context: Tensors that the term reads besides the state.
        """


class Refreshing(Protocol):
    """Term that freezes signs or similar quantities after `Facts.refresh_until` iterations."""

    def refresh(self, state: State, context: Context) -> Context:
        """Return `context` updated to the current state."""


class StartingAhead(Protocol):
    """Term whose gradient at the zero state costs nothing; a solve then starts one step ahead."""

    def first_descent(self, context: Context) -> State | None:
        """Return the descent −∇E(0; x) at the zero state, or None if it costs an evaluation."""


class Rounded(Protocol):
    """Term that bounds its own rounding error, which class certificates need."""

    def rounding(
        self, exact: Any, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Return a bound on the distance of the computed gradient ∇E to that of `exact`."""


def calibrate(term: Energy, image: State, context: Context) -> Context:
    """Add scales that a term computes from the first step of a solve; by default none.

    Args:
        term: The term.
        image: T(0), the map at the zero state.
        context: Tensors that the term reads besides the state.
    """
    method: Any = getattr(term, "calibrate", None)
    return context if method is None else method(image, context)


def refresh(term: Energy, state: State, context: Context) -> Context:
    """Recompute what a term freezes after some iterations, such as signs; by default nothing.

    Args:
        term: The term.
        state: Current iterate.
        context: Tensors that the term read until now.
    """
    method: Any = getattr(term, "refresh", None)
    return context if method is None else method(state, context)


def first_descent(term: Energy, context: Context) -> State | None:
    """Return a term's descent −∇E(0; x) at the zero state if it costs nothing.

    By default it is None, and a solve starts at zero.
    """
    method: Any = getattr(term, "first_descent", None)
    return None if method is None else method(context)


def rounding(
    term: Energy, exact: Energy, context: Context, layout: Layout, unit: float
) -> Rounding | None:
    """Return a bound on the rounding error of a term's gradient; by default None (not known).

    Args:
        term: The term in its working precision.
        exact: The same term in float64.
        context: Tensors that `exact` reads besides the state, in float64.
        layout: Shapes of the tensors of the state, without the batch dimension.
        unit: Unit roundoff of the working precision.
    """
    method: Any = getattr(term, "rounding", None)
    return None if method is None else method(exact, context, layout, unit)
