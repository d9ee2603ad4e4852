"""Optional capabilities of a term beyond `Energy`: one protocol and one function for each.

A term implements a method of a protocol, and nothing else. Callers use the function, which returns
a correct default for terms without the method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from equilibria.context import Context, State
from equilibria.context.state import Layout
from equilibria.energies.rounding import Rounding

if TYPE_CHECKING:
    from equilibria.energies.base import Energy


class Calibrating(Protocol):
    """Computes scales once per solve, at its first image; set `Facts.calibrates` too."""

    def calibrate(self, image: State, context: Context) -> Context:
        """Return `context` with scales computed at the first image T(0), in the graph."""


class Refreshing(Protocol):
    """Freezes signs or the like after `Facts.refresh_until` iterations."""

    def refresh(self, state: State, context: Context) -> Context:
        """Return `context` renewed at a state."""


class StartingAhead(Protocol):
    """Knows −∇E at zero without computing anything, so that a solve starts one step ahead."""

    def first_descent(self, context: Context) -> State | None:
        """Return −∇E(0; x), or None where it is not free."""


class Rounded(Protocol):
    """Bounds its own rounding error, which certificates of classes need."""

    def rounding(
        self, exact: Any, context: Context, layout: Layout, unit: float
    ) -> Rounding | None:
        """Bound the distance of a computed ∇E from that of `exact`."""


def calibrate(term: Energy, image: State, context: Context) -> Context:
    """Return `context` with the scales of the term at the first image; by default as it is."""
    own: Any = getattr(term, "calibrate", None)
    return context if own is None else own(image, context)


def refresh(term: Energy, state: State, context: Context) -> Context:
    """Return `context` renewed at a state; by default as it is."""
    own: Any = getattr(term, "refresh", None)
    return context if own is None else own(state, context)


def first_descent(term: Energy, context: Context) -> State | None:
    """Return −∇E(0; x) where it is free; by default None, and a solve starts at zero."""
    own: Any = getattr(term, "first_descent", None)
    return None if own is None else own(context)


def rounding(
    term: Energy, exact: Energy, context: Context, layout: Layout, unit: float
) -> Rounding | None:
    """Bound how far a computed ∇E is from the exact one; by default None, not known.

    Args:
        term: The term as it computes.
        exact: The same term in float64.
        context: The context of `exact`.
        layout: Shapes of the state.
        unit: Unit roundoff of the type that `term` computes in.
    """
    own: Any = getattr(term, "rounding", None)
    return None if own is None else own(exact, context, layout, unit)
