"""What a gradient rule is, and what it needs of a cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from equilibria.context import Context, State
from equilibria.context.caller import warn_caller
from equilibria.solvers import ConvergenceError, ConvergenceWarning, FixedPointProblem, Solution
from equilibria.solvers.linear.base import LinearSolution
from equilibria.solvers.method import Method


class Symmetry(Enum):
    """What is known of the Jacobian J of the map, and so which backward solver is right.

    Examples:
        >>> eq.EnergyCell(eq.Input(torch.eye(2))).symmetry.name  # in the inner product of σ′
        'WEIGHTED'
    """

    NONE = "none"
    """Nothing: GMRES."""
    PLAIN = "plain"
    """J = Jᵀ, as for OptEq in z-space: conjugate gradients."""
    WEIGHTED = "weighted"
    """J = SH with H symmetric and S = σ′ diagonal, as for every energy: conjugate gradients in the
    inner product weighted by S."""


class Linearization(NamedTuple):
    """One evaluation of a map at an equilibrium, for its derivatives."""

    image: State
    """T(y; x)."""
    weight: State | None = None
    """S = σ′(d) ≥ 0, for `Symmetry.WEIGHTED`."""
    argument: State | None = None
    """d, if T(y; x) = (1 − α) y + α σ(d(y; x)): its Jacobian H in y is symmetric, and all that a
    gradient is asked for reaches T through it alone."""


class Map(Protocol):
    """The part of a cell that gradient rules use."""

    symmetry: Symmetry

    def step(self, state: State, context: Context) -> State:
        """Return the next state."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names."""


class BackwardLog:
    """The backward solves of one layer: how the last one went, and where the next may start."""

    def __init__(self, warned: set[str] | None = None) -> None:
        self.latest: LinearSolution | None = None
        self.warned = set() if warned is None else warned
        """What was warned of, once for all twins of a layer."""
        self._solutions: dict[bool, Tensor] = {}

    def remember(self, solution: Tensor, *, transposed: bool) -> None:
        """Keep the solution of a backward solve as the next warm start."""
        self._solutions[transposed] = solution.detach()

    def start(self, rhs: Tensor, *, transposed: bool) -> Tensor | None:
        """The last solution, if it fits the right-hand side."""
        last = self._solutions.get(transposed)
        if last is None or last.shape != rhs.shape or last.device != rhs.device:
            return None
        return last.to(rhs.dtype)


@dataclass(frozen=True)
class Backward:
    """What a forward pass leaves for its backward solves: the log, and who else is told.

    A failure warns once, or raises where the layer is strict: a wrong gradient is never silent.
    """

    log: BackwardLog = field(default_factory=BackwardLog)
    strict: bool = False
    told: Callable[[LinearSolution], None] | None = None

    def record(self, found: LinearSolution) -> None:
        """Take in the facts of a solve, without its value, which is as large as u."""
        facts = replace(found, value=found.value.new_empty(0))
        self.log.latest = facts
        if not bool(found.converged.all()):
            if self.strict:
                raise ConvergenceError(found.summary())
            if "backward" not in self.log.warned:
                self.log.warned.add("backward")
                warn_caller(found.summary(), ConvergenceWarning)
        if self.told is not None:
            self.told(facts)


class GradientRule(ABC):
    """How an equilibrium is differentiated; independent of the solver that finds it.

    Examples:
        >>> rule = eq.gradients.get_gradient("phantom", steps=5)
        >>> isinstance(rule, eq.gradients.GradientRule), rule.steps
        (True, 5)
    """

    exact: ClassVar[bool]
    """Whether the gradient is that of the equilibrium, up to the tolerances."""
    from_zero: ClassVar[bool] = False
    """Whether the iterations are differentiated, and so must start at a constant."""

    @abstractmethod
    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Method, backward: Backward
    ) -> tuple[State, Solution]:
        """The equilibrium, attached to the graph of context and parameters, and its solve."""


def needs_graph(cell: Map, context: Context) -> bool:
    """Whether anything that the equilibrium depends on wants a gradient."""
    return torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in context.tensors())
        or any(parameter.requires_grad for _, parameter in cell.named_parameters())
    )
