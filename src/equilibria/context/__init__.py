"""What a solve is about: the state that is iterated and the context it is iterated in."""

from equilibria.context.context import Context
from equilibria.context.state import State

__all__ = [
    "Context",
    "State",
]
