"""State and context of a solve: the iterated tensors, and the tensors that the map reads."""

from equilibria.context.context import Context
from equilibria.context.state import State

__all__ = [
    "Context",
    "State",
]
