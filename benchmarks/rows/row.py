"""Definition of a row of the suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.contest import Settings
from benchmarks.results import Result


@dataclass(frozen=True)
class Row:
    """A row: its name, a line about it, and the measurement."""

    name: str
    about: str
    measure: Callable[[Settings], Iterable[Result]]
    needs_peer: bool = True
    depends_on_seed: bool = True
    """Whether the result depends on random weights and inputs. Memory does not."""
