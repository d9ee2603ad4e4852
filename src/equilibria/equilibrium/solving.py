"""How the layers of a model solve and differentiate, and how to change that for a while."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import map_state
from equilibria.gradients import GradientRule, get_gradient
from equilibria.solvers import Solution, get_solver
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method

if TYPE_CHECKING:
    from equilibria.equilibrium.layer import EquilibriumLayer

Recording: TypeAlias = Literal["solves", "equilibria", "iterates"]
Starts: TypeAlias = "Mapping[EquilibriumLayer, State | None] | Literal['last'] | None"


@dataclass(frozen=True)
class Solving:
    """How a layer finds its equilibrium and differentiates through it.

    solver, gradient: by name, as objects, or as a mapping with a name and options.
    tolerance, max_iterations: of the solver; None leaves it its own.
    strict: raise `ConvergenceError` where a solve, forward or backward, does not converge.

    Examples:
        >>> exact = eq.Solving(solver="anderson", tolerance=1e-8, gradient="implicit", strict=True)
        >>> eq.EquilibriumLayer(eq.Input(torch.eye(2)), solving=exact).solving.tolerance
        1e-08
    """

    solver: Method = "auto"  # type: ignore[assignment]
    gradient: GradientRule = "auto"  # type: ignore[assignment]
    tolerance: float | None = None
    max_iterations: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        solver = get_solver(self.solver)
        limits = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
        if given:
            solver = dataclasses.replace(solver, **given)
        for name, value in (
            ("solver", solver),
            ("gradient", get_gradient(self.gradient)),
            ("tolerance", solver.tolerance),
            ("max_iterations", solver.max_iterations),
        ):
            object.__setattr__(self, name, value)

    def changed(self, **changes: Any) -> Solving:
        """The same but for what is given and not None. A solver by its name keeps the limits."""
        given = {name: value for name, value in changes.items() if value is not None}
        if not given:
            return self
        if not isinstance(given.get("solver", ""), str):
            given = {"tolerance": None, "max_iterations": None, **given}
        return dataclasses.replace(self, **given)


@dataclass(frozen=True)
class Equilibrium:
    """One forward pass of a layer: its inputs and the equilibrium it found, in the graph."""

    layer: EquilibriumLayer
    inputs: tuple[Tensor, ...]
    state: State
    context: Context


@dataclass
class Record:
    """What was solved inside a `solving` block, in the order in which it happened.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)))
        >>> with eq.solving(layer, record=True) as record:
        ...     layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
        >>> len(record.solutions), len(record.backward)
        (1, 1)
    """

    keep: Recording | None = None
    solutions: list[Solution] = field(default_factory=list)
    """Forward solves; with their states and traces if "iterates" were asked for."""
    backward: list[LinearSolution] = field(default_factory=list)
    """Backward solves, without their values."""
    equilibria: list[Equilibrium] = field(default_factory=list)
    """Forward passes, if "equilibria" were asked for."""
    visited: list[Equilibrium] = field(default_factory=list)
    """Then also iterates of searches over inputs, one a search (`report_visited`)."""

    @property
    def evaluations(self) -> int:
        """Calls of the map in all forward solves."""
        return sum(solution.evaluations for solution in self.solutions)


@dataclass(frozen=True)
class SolvingBlock:
    """One `solving` block: which layers it covers, and what is different for them."""

    layers: frozenset[object]
    """Their identities, which twins share."""
    changes: Mapping[str, Any]
    start: Mapping[object, State | None] | Literal["last"] | None
    last: dict[object, State]
    record: Record
    private: bool


_blocks: ContextVar[tuple[SolvingBlock, ...]] = ContextVar("equilibria_solving", default=())


@contextmanager
def solving(
    model: nn.Module,
    *,
    solver: str | Mapping[str, Any] | Method | None = None,
    gradient: str | Mapping[str, Any] | GradientRule | None = None,
    tolerance: float | None = None,
    max_iterations: int | None = None,
    strict: bool | None = None,
    start: Starts = None,
    record: bool | Recording = False,
    private: bool = False,
) -> Iterator[Record]:
    """Inside the block the layers of `model` solve as told; after it everything is as before.

    Nothing is written to a layer: the change holds for this thread (or task) and this block alone,
    whatever ends it. Blocks nest; an inner one wins, and all of them record. Backward passes of
    what was computed inside are recorded too, even if they run after the block.

    start: where solves start: a state for each layer (None: where its cell does), or "last", where
        the layer's last solve in the block ended.
    record: True or "solves": the facts of every solve. "equilibria": also the passes, in the graph.
        "iterates": also every iterate.
    private: blocks around this one neither record what happens inside nor say where solves start.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)))
        >>> with eq.solving(layer, tolerance=1e-6, record=True) as record:
        ...     y = layer(torch.ones(1, 2))
        >>> record.solutions[0].tolerance
        1e-06
    """
    from equilibria.equilibrium.layer import EquilibriumLayer

    changes = {
        "solver": solver,
        "gradient": gradient,
        "tolerance": tolerance,
        "max_iterations": max_iterations,
        "strict": strict,
    }
    known = start if start is None or start == "last" else {k.identity: s for k, s in start.items()}
    layers = (m.identity for m in model.modules() if isinstance(m, EquilibriumLayer))
    block = SolvingBlock(
        layers=frozenset(layers),
        changes={name: value for name, value in changes.items() if value is not None},
        start=known,
        last={},
        record=Record("solves" if record is True else record or None),
        private=private,
    )
    token = _blocks.set((*_blocks.get(), block))
    try:
        yield block.record
    finally:
        _blocks.reset(token)


def _covering(layer: EquilibriumLayer) -> list[SolvingBlock]:
    """Return the `solving` blocks around the call that cover a layer, the outermost first."""
    blocks = _blocks.get()
    return [block for block in blocks if layer.identity in block.layers] if blocks else []


def _changed(own: Solving, blocks: list[SolvingBlock]) -> Solving:
    for block in blocks:
        own = own.changed(**block.changes)
    return own


def solving_of(layer: EquilibriumLayer) -> Solving:
    """Return the settings that a layer solves with now: its own, as blocks around change them."""
    return _changed(layer.solving, _covering(layer))


class Active:
    """The settings of a layer during one call, and the `solving` blocks that it reports to."""

    def __init__(self, layer: EquilibriumLayer) -> None:
        self.layer = layer
        covering = _covering(layer)
        self.solving = _changed(layer.solving, covering)
        hidden = max((i for i, block in enumerate(covering) if block.private), default=0)
        self.blocks = covering[hidden:]

    @property
    def records_iterates(self) -> bool:
        return any(record.keep == "iterates" for record in self._records())

    def _records(self) -> list[Record]:
        return [block.record for block in self.blocks if block.record.keep is not None]

    def _starting(self) -> SolvingBlock | None:
        """The innermost block that says where solves start."""
        return next((block for block in reversed(self.blocks) if block.start is not None), None)

    def start(self) -> State | None:
        block = self._starting()
        if block is None or block.start is None:
            return None
        return (block.last if block.start == "last" else block.start).get(self.layer.identity)

    def note(self, solution: Solution) -> None:
        for record in self._records():
            record.solutions.append(solution if record.keep == "iterates" else solution.facts())

    def note_backward(self, solution: LinearSolution) -> None:
        for record in self._records():
            record.backward.append(solution)

    @property
    def records_equilibria(self) -> bool:
        return any(record.keep == "equilibria" for record in self._records())

    def note_visited(self, inputs: tuple[Tensor, ...], state: State, context: Context) -> None:
        for record in self._records():
            if record.keep == "equilibria":
                record.visited.append(Equilibrium(self.layer, inputs, state, context))

    def note_equilibrium(self, inputs: tuple[Tensor, ...], state: State, context: Context) -> None:
        starting = self._starting()
        if starting is not None and starting.start == "last":
            starting.last[self.layer.identity] = map_state(lambda tensor: tensor.detach(), state)
        for record in self._records():
            if record.keep == "equilibria":
                record.equilibria.append(Equilibrium(self.layer, inputs, state, context))
