"""Steps of cells as functions of all tensors that they read, as loops of a graph need them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from equilibria.compiled.store import Parts
from equilibria.context import Context
from equilibria.context.state import State, state_tensors, unflatten_state
from equilibria.context.twin import twin
from equilibria.equilibrium import Cell
from equilibria.solvers.graph import StateMap, Variables


def lifted_step(cell: Cell, context: Context, like: State) -> tuple[StateMap, Variables]:
    """Return the step of a cell as a function of a state and of constants, and the constants.

    A loop in a graph cannot read tensors that are not passed to it, and must not get the same
    memory twice.

    Args:
        cell: The cell.
        context: Tensors that the step reads besides the state.
        like: State with the structure of all states.
    """
    held = Parts(cell).tensors()
    given = context.tensors()
    constants, places = _distinct([*given, *held])
    skeleton = context.skeleton()

    def step(state: Variables, constants: Sequence[Tensor]) -> Variables:
        tensors = [constants[place] for place in places]
        moved = dict(zip(map(id, held), tensors[len(given) :], strict=True))
        of_constants = twin(cell, lambda tensor: moved.get(id(tensor), tensor))
        image = of_constants.step(
            unflatten_state(like, state), skeleton.replace(tensors[: len(given)])
        )
        return state_tensors(image)

    return step, constants


def _distinct(tensors: Sequence[Tensor]) -> tuple[Variables, list[int]]:
    """Return tensors that share no memory, and the place of each given tensor among them."""
    distinct: list[Tensor] = []
    places: dict[int, int] = {}
    memory: set[int] = set()
    for tensor in tensors:
        if id(tensor) in places:
            continue
        places[id(tensor)] = len(distinct)
        storage = tensor.untyped_storage()._cdata
        distinct.append(tensor.clone() if storage in memory else tensor)
        memory.add(storage)
    return tuple(distinct), [places[id(tensor)] for tensor in tensors]
