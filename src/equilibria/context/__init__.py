"""What a solve is about: the state that is iterated and the context it is iterated in."""

from equilibria.context.caller import warn_caller
from equilibria.context.context import Context, Entry, is_exporting, numbered, run_eagerly
from equilibria.context.state import (
    Layout,
    Packing,
    State,
    at_least_float32,
    batch_size,
    map_state,
    state_tensors,
    sum_per_sample,
    unflatten_state,
)
from equilibria.context.twin import twin

__all__ = [
    "Context",
    "Entry",
    "Layout",
    "Packing",
    "State",
    "at_least_float32",
    "batch_size",
    "is_exporting",
    "map_state",
    "numbered",
    "run_eagerly",
    "state_tensors",
    "sum_per_sample",
    "twin",
    "unflatten_state",
    "warn_caller",
]
