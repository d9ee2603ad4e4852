"""What a row of the suite is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.contest import Settings
from benchmarks.results import Result


@dataclass(frozen=True)
class Row:
    """A name to ask for it by, what it measures in one line, and the measurement."""

    name: str
    about: str
    measure: Callable[[Settings], Iterable[Result]]
    needs_peer: bool = True
    depends_on_seed: bool = True
    """Whether other weights and inputs could give another result: memory is what it is."""
