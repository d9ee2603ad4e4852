"""Solver settings of layers, and the context manager that changes them temporarily."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.state import map_state
from equilibria.equilibrium.starts import MAX_STARTS, RandomStart, Start, get_start
from equilibria.gradients import GradientRule, get_gradient
from equilibria.registry import check_at_least_one, check_choice, check_not_negative
from equilibria.solvers import Solution, get_solver
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method
from equilibria.solvers.multistart import MultiStart, Pick

if TYPE_CHECKING:
    from equilibria.equilibrium.layer import EquilibriumLayer

Recording: TypeAlias = Literal["solves", "equilibria", "iterates"]
Starts: TypeAlias = (
    "Mapping[EquilibriumLayer, State | None] | str | Mapping[str, Any] | Start | None"
)


@dataclass(frozen=True)
class Solving:
    """Settings for solving and differentiating a layer.

    Args:
        solver: Solver: its name, an object, or a mapping with `name` and options.
        gradient: Gradient rule: its name, an object, or a mapping with `name` and options.
        tolerance: Tolerance of the relative residual; None uses the solver's default.
        max_iterations: Iteration limit; None uses the solver's default.
        strict: Whether a forward or backward solve that does not converge raises
            `ConvergenceError`.
        start: Start of a solve: "cell" for the start that the cell defines, "random" for
            independent normal numbers, or a mapping such as {"name": "random", "scale": 0.1,
            "seed": 1}. In training mode, random starts come from PyTorch's global generator; in
            evaluation mode they come from the seed and are the same for every sample.
        state_noise: Standard deviation of normal noise that is added to every start in training
            mode. It makes a map robust to perturbations of its state.
        starts: Number of starts per sample in evaluation mode and in `solve`: the usual start, and
            random ones. They are solved as one larger batch.
        pick: Which of several solutions of a sample is returned: that with the smallest residual
            ("residual"), or that with which most others agree ("vote").

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
    start: Start = "cell"  # type: ignore[assignment]
    state_noise: float = 0.0
    starts: int = 1
    pick: Pick = "residual"

    def __post_init__(self) -> None:
        check_not_negative(state_noise=self.state_noise)
        check_at_least_one(starts=self.starts)
        check_choice(get_args(Pick), pick=self.pick)
        if self.starts > MAX_STARTS:
            raise ValueError(f"starts must be at most {MAX_STARTS}, got {self.starts}")
        solver = get_solver(self.solver)
        limits = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        changes: dict[str, Any] = {
            name: value for name, value in limits.items() if value is not None
        }
        if changes:
            solver = dataclasses.replace(solver, **changes)
        for name, value in (
            ("solver", solver),
            ("gradient", get_gradient(self.gradient)),
            ("start", get_start(self.start)),
            ("tolerance", solver.tolerance),
            ("max_iterations", solver.max_iterations),
        ):
            object.__setattr__(self, name, value)

    def changed(self, **changes: Any) -> Solving:
        """Return a copy with some settings changed.

        Args:
            **changes: New settings; None leaves a setting unchanged. A solver given by name keeps
                the current tolerance and iteration limit, a solver object brings its own.
        """
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            return self
        if not isinstance(changes.get("solver", ""), str):
            changes = {"tolerance": None, "max_iterations": None, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def random_start(self) -> RandomStart | None:
        """The start if it is random, else None."""
        return self.start if isinstance(self.start, RandomStart) else None

    def method(self) -> Method:
        """Return the solver, with several starts per sample if `starts` is above 1."""
        if self.starts == 1:
            return self.solver
        drawn = self.random_start or RandomStart()
        settings = {f.name: getattr(self.solver, f.name) for f in dataclasses.fields(Method)}
        return MultiStart(
            base=self.solver,
            starts=self.starts,
            pick=self.pick,
            draw=partial(drawn.draw, training=False),
            **settings,
        )


@dataclass(frozen=True)
class Equilibrium:
    """Inputs and equilibrium of one forward pass of a layer, attached to the autograd graph."""

    layer: EquilibriumLayer
    inputs: tuple[Tensor, ...]
    state: State
    context: Context


@dataclass
class Record:
    """Record of the solves inside a `solving` block, in chronological order.

    Attributes:
        keep: What is recorded: "solves", "equilibria", "iterates", or None for nothing.
        solutions: Results of forward solves; with states and traces if `keep` is "iterates".
        backward: Results of backward solves, without their values.
        equilibria: Equilibria of forward passes, attached to the autograd graph, if `keep` is
            "equilibria".
        visited: One iterate per search over inputs, if `keep` is "equilibria".

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)))
        >>> with eq.solving(layer, record=True) as record:
        ...     layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
        >>> len(record.solutions), len(record.backward)
        (1, 1)
    """

    keep: Recording | None = None
    solutions: list[Solution] = field(default_factory=list)
    backward: list[LinearSolution] = field(default_factory=list)
    equilibria: list[Equilibrium] = field(default_factory=list)
    visited: list[Equilibrium] = field(default_factory=list)

    @property
    def evaluations(self) -> int:
        """Number of evaluations of the map in all forward solves."""
        return sum(solution.evaluations for solution in self.solutions)


@dataclass(frozen=True)
class SolvingBlock:
    """A `solving` block: the layers it applies to, and their changed settings."""

    layers: frozenset[object]
    """Identities of the layers, which functional copies share."""
    changes: Mapping[str, Any]
    start: Mapping[object, State | None] | Literal["last"] | None
    last: dict[object, State]
    record: Record
    private: bool = False
    replaced: Mapping[object, Solving] = field(default_factory=dict)
    """Settings that replace those of a layer, by identity, before the changes apply."""


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
    state_noise: float | None = None,
    starts: int | None = None,
    pick: Pick | None = None,
    record: bool | Recording = False,
    private: bool = False,
) -> Iterator[Record]:
    """Change the solver settings of all layers of `model` inside a `with` block.

    The layers themselves are not modified: the change applies to this block in this thread (or
    task), and ends with it, also after an exception. In nested blocks the inner settings take
    precedence, and all blocks record. Backward passes of results computed inside the block are
    recorded even if they run after it.

    Args:
        model: Module whose equilibrium layers are affected.
        solver: Solver: its name, an object, or a mapping with `name` and options.
        gradient: Gradient rule: its name, an object, or a mapping with `name` and options.
        tolerance: Tolerance of the relative residual.
        max_iterations: Iteration limit.
        strict: Whether a solve that does not converge raises `ConvergenceError`.
        start: Where solves start: a mapping from layer to state (None: the layer's usual start),
            "last" for the final state of the layer's previous solve in the block (warm start), or
            as in `Solving`, such as "random".
        state_noise: Noise on the start in training mode, see `Solving`.
        starts: Number of starts per sample, see `Solving`.
        pick: Which of several solutions of a sample is returned, see `Solving`.
        record: What the yielded `Record` contains. True or "solves": the results of all solves,
            without states. "equilibria": also the equilibria of forward passes, attached to the
            autograd graph. "iterates": the results with their states and traces.
        private: Whether to hide the block from enclosing ones, which then neither record its solves
            nor define their starts.

    Yields:
        The `Record` of the block.

    Examples:
        >>> layer = eq.EquilibriumLayer(eq.Input(torch.eye(2)))
        >>> with eq.solving(layer, tolerance=1e-6, record=True) as record:
        ...     y = layer(torch.ones(1, 2))
        >>> record.solutions[0].tolerance
        1e-06
    """
    from equilibria.equilibrium.layer import EquilibriumLayer

    changes: dict[str, Any] = {
        "solver": solver,
        "gradient": gradient,
        "tolerance": tolerance,
        "max_iterations": max_iterations,
        "strict": strict,
        "state_noise": state_noise,
        "starts": starts,
        "pick": pick,
    }
    block_start: Mapping[object, State | None] | Literal["last"] | None = None
    if start == "last":
        block_start = "last"
    elif isinstance(start, Mapping) and "name" not in start:
        states = cast("Mapping[EquilibriumLayer, State | None]", start)
        block_start = {layer.identity: state for layer, state in states.items()}
    elif start is not None:
        # The empty mapping hides the starts of enclosing blocks.
        changes["start"], block_start = get_start(cast("Start", start)), {}
    layers = (m.identity for m in model.modules() if isinstance(m, EquilibriumLayer))
    block = SolvingBlock(
        layers=frozenset(layers),
        changes={name: value for name, value in changes.items() if value is not None},
        start=block_start,
        last={},
        record=Record("solves" if record is True else record or None),
        private=private,
    )
    token = _blocks.set((*_blocks.get(), block))
    try:
        yield block.record
    finally:
        _blocks.reset(token)


def in_block() -> bool:
    """Return whether the caller is inside any `solving` block."""
    return bool(_blocks.get())


def _covering(layer: EquilibriumLayer) -> list[SolvingBlock]:
    """Return the enclosing `solving` blocks that apply to a layer, outermost first."""
    blocks = _blocks.get()
    return [block for block in blocks if layer.identity in block.layers] if blocks else []


@contextmanager
def replaced_settings(settings: Mapping[object, Solving]) -> Iterator[None]:
    """Replace the settings of layers inside a `with` block, see `solving`.

    Args:
        settings: New settings by identity of the layer.
    """
    block = SolvingBlock(
        layers=frozenset(settings),
        changes={},
        start=None,
        last={},
        record=Record(),
        replaced=settings,
    )
    token = _blocks.set((*_blocks.get(), block))
    try:
        yield
    finally:
        _blocks.reset(token)


def _changed(layer: EquilibriumLayer, blocks: list[SolvingBlock]) -> Solving:
    settings = layer.solving
    for block in blocks:
        settings = block.replaced.get(layer.identity, settings).changed(**block.changes)
    return settings


def solving_of(layer: EquilibriumLayer) -> Solving:
    """Return the current settings of a layer, including changes by enclosing blocks."""
    return _changed(layer, _covering(layer))


class Active:
    """Settings of a layer during one call, and the `solving` blocks that record it."""

    def __init__(self, layer: EquilibriumLayer) -> None:
        self.layer = layer
        covering = _covering(layer)
        self.solving = _changed(layer, covering)
        hidden = max((i for i, block in enumerate(covering) if block.private), default=0)
        self.blocks = covering[hidden:]

    @property
    def records_iterates(self) -> bool:
        return any(record.keep == "iterates" for record in self._records())

    def _records(self) -> list[Record]:
        return [block.record for block in self.blocks if block.record.keep is not None]

    def _starting(self) -> SolvingBlock | None:
        """Return the innermost block that defines where solves start."""
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
