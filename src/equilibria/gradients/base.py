"""Base class of gradient rules, and the part of a cell that they use."""

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
    """Known symmetry of the Jacobian J of the map, which selects the backward solver.

    Examples:
        >>> eq.EnergyCell(eq.Input(torch.eye(2))).symmetry.name  # in the inner product of σ′
        'WEIGHTED'
    """

    NONE = "none"
    """No symmetry; solved by GMRES."""
    PLAIN = "plain"
    """J = Jᵀ, as for OptEq in z-space; solved by conjugate gradients."""
    WEIGHTED = "weighted"
    """J = SH with H symmetric and S = σ′ diagonal, as for every energy; solved by conjugate
    gradients in the inner product weighted by S."""


class Linearization(NamedTuple):
    """One evaluation of a map at an equilibrium, for its derivatives."""

    image: State
    """T(y; x), the value of the map at the state y."""
    weight: State | None = None
    """S = σ′(d) ≥ 0, the activation's slope at the argument d, for `Symmetry.WEIGHTED`."""
    argument: State | None = None
    """Argument d of the activation, if T(y; x) = (1 − α) y + α σ(d(y; x)): its Jacobian in y is
    symmetric, and T depends on the inputs of the gradient only through d."""


class Map(Protocol):
    """The members of a cell (`equilibrium.Cell`) that gradient rules such as `Implicit` use."""

    symmetry: Symmetry

    def step(self, state: State, context: Context) -> State:
        """Return T(y; x), one step of the map.

        Args:
            state: The state y.
            context: Tensors that a step reads besides the state; they depend on the input x.
        """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names."""


class BackwardLog:
    """The last backward solves of one layer, also used as warm starts."""

    def __init__(self, warned: set[str] | None = None) -> None:
        self.latest: LinearSolution | None = None
        self.warned = set() if warned is None else warned
        """Kinds of warnings already issued, shared by all twins of a layer."""
        self._solutions: dict[bool, Tensor] = {}

    def remember(self, solution: Tensor, *, transposed: bool) -> None:
        """Store the solution of a backward solve as the next warm start."""
        self._solutions[transposed] = solution.detach()

    def start(self, rhs: Tensor, *, transposed: bool) -> Tensor | None:
        """Return the last solution if it fits the right-hand side, else None."""
        last = self._solutions.get(transposed)
        if last is None or last.shape != rhs.shape or last.device != rhs.device:
            return None
        return last.to(rhs.dtype)


@dataclass(frozen=True)
class Backward:
    """Reports backward solves to the log, the user, and an optional listener.

    A failed solve warns once, or raises an error if the layer is strict.

    Args:
        log: Log of the layer.
        strict: Whether a failed solve raises `ConvergenceError`.
        listener: Called with every backward solution, without its value.
    """

    log: BackwardLog = field(default_factory=BackwardLog)
    strict: bool = False
    listener: Callable[[LinearSolution], None] | None = None

    def record(self, solution: LinearSolution) -> None:
        """Record a solve, without its value, which is as large as the state."""
        facts = replace(solution, value=solution.value.new_empty(0))
        self.log.latest = facts
        if not bool(solution.converged.all()):
            if self.strict:
                raise ConvergenceError(solution.summary())
            if "backward" not in self.log.warned:
                self.log.warned.add("backward")
                warn_caller(solution.summary(), ConvergenceWarning)
        if self.listener is not None:
            self.listener(facts)


class GradientRule(ABC):
    """Base class of rules for the gradient of an equilibrium; they work with any solver.

    Examples:
        >>> rule = eq.gradients.get_gradient("phantom", steps=5)
        >>> isinstance(rule, eq.gradients.GradientRule), rule.steps
        (True, 5)
    """

    exact: ClassVar[bool]
    """Whether the rule computes the gradient of the equilibrium, up to the tolerances."""
    from_zero: ClassVar[bool] = False
    """Whether the rule differentiates the iterations, which then must start at a constant."""

    @abstractmethod
    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Method, backward: Backward
    ) -> tuple[State, Solution]:
        """Compute the equilibrium, differentiable in the input and the parameters.

        Args:
            cell: Cell that defines the map.
            problem: Problem to solve.
            solver: Method that solves it.
            backward: Receives the result of every backward solve.

        Returns:
            The equilibrium, and the solution without a graph.
        """


def needs_graph(cell: Map, context: Context) -> bool:
    """Return whether an equilibrium must be differentiable.

    That is the case if gradients are enabled, and a parameter of the cell or a tensor that its
    steps read (the context) requires one.
    """
    return torch.is_grad_enabled() and (
        any(tensor.requires_grad for tensor in context.tensors())
        or any(parameter.requires_grad for _, parameter in cell.named_parameters())
    )
