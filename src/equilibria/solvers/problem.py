"""A fixed-point problem as solvers see it: a map on the rows of one buffer."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.state import Packing, map_state, state_tensors, unflatten_state
from equilibria.energies import Energy
from equilibria.solvers.convergence import row_rounding, row_units


@dataclass(frozen=True)
class Potential:
    """The hidden objective G(y) = 1ᵀf(y) + ½‖y‖² + E(y; x) on the rows of a problem's buffer.

    alpha, damping: of the map whose fixed points are its stationary points (see `EnergyCell`).
    is_convex: whether G is known to be convex: every stationary point is then a minimum.
    """

    energy: Energy
    activation: Activation
    alpha: float = 1.0
    damping: float = 1.0
    is_convex: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the map is σ(−∇E) itself."""
        return self.alpha == 1 and self.damping == 1

    def evaluate(self, problem: FixedPointProblem, y: Tensor) -> tuple[Tensor, Tensor]:
        """E(y; x) of each row, and −∇E(y; x)."""
        state = problem.unpack(y)
        value = self.energy.value(state, problem.context).reshape(-1)
        return value, problem.pack(self.energy.descent(state, problem.context))

    def image(self, y: Tensor, descent: Tensor) -> Tensor:
        """T(y), given −∇E(y; x)."""
        mapped = self.activation(y + self.damping * (descent - y))
        return y + self.alpha * (mapped - y)

    def hessian_product(self, problem: FixedPointProblem, y: Tensor) -> Callable[[Tensor], Tensor]:
        """Apply v ↦ ∇²E(y; x) v, the derivative of −∇E, which is symmetric, by autograd."""
        return self.linearize(problem, y)[1]

    def linearize(
        self, problem: FixedPointProblem, y: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """−∇E(y; x) of each row, and v ↦ ∇²E(y; x) v, from one evaluation."""
        with torch.enable_grad():
            point = y.detach().requires_grad_()
            descent = problem.pack(self.energy.descent(problem.unpack(point), problem.context))

        def product(v: Tensor) -> Tensor:
            if not descent.requires_grad:  # E is linear.
                return torch.zeros_like(v)
            (pulled,) = torch.autograd.grad(
                descent, point, v, retain_graph=True, materialize_grads=True
            )
            return -pulled

        return descent.detach(), product


@dataclass
class FixedPointProblem:
    """Find y with y = step(y, context), starting from `start`.

    For the first `refresh_until` iterations the context is renewed by `refresh` (signs or
    perturbations that depend on the state); after them the map is fixed.

    Examples:
        >>> problem = eq.solvers.FixedPointProblem(
        ...     lambda y, context: y / 2 + 1, eq.Context(), torch.zeros(1, 1)
        ... )
        >>> eq.Picard().solve(problem).state.round(decimals=2)
        tensor([[2.]])
    """

    step: Callable[[State, Context], State]
    context: Context
    start: State
    """Where to start."""
    couples_batch: bool = False
    separable: bool = False
    """Whether some samples can be solved without the others, to the same end."""
    refresh: Callable[[State, Context], Context] | None = None
    refresh_until: int = 0
    monotone: bool = False
    """Whether the Jacobian is symmetric (plainly or weighted) with no negative eigenvalue: the
    step is then a gradient step that momentum can only help."""
    contraction: float | None = None
    """A factor below which the map is proven to contract, if one is known for nothing."""
    solved_once: bool = False
    """Whether the solver may let go of the start, which is as large as the state."""
    remedy: str = ""
    """What to do where the iterations run out, if the map's owner knows."""
    trace: bool | Literal["states"] = False
    """What is to be recorded of every iteration."""
    unit: Tensor | None = None
    """What the numbers of each row are counted in, shape (rows, 1); None: in ones."""
    records_step: bool = False
    """Whether every evaluation must call `step`, because the caller records the calls."""
    potential: Potential | None = None
    """The hidden objective whose stationary points the fixed points are, if there is one."""

    def __post_init__(self) -> None:
        first = state_tensors(self.start)[0]
        self.packing = Packing.of(self.start, self.couples_batch)
        self.state_dtype = first.dtype
        self.device_type = first.device.type

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The type of iterates and residuals: at least float32, whatever the map computes in."""
        small = self.state_dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if small else self.state_dtype

    @property
    def epsilon(self) -> float:
        """The relative precision of what the map computes."""
        if torch.is_autocast_enabled(self.device_type):
            return torch.finfo(torch.get_autocast_dtype(self.device_type)).eps
        return torch.finfo(self.state_dtype).eps

    def take_start(self) -> Tensor:
        """The start, packed; a problem that is solved once then no longer holds it."""
        flat = self.pack(self.start)
        if self.solved_once:
            nothing = (tensor.new_empty(0) for tensor in state_tensors(self.start))
            self.start = unflatten_state(self.start, nothing)
        return flat

    def pack(self, state: State) -> Tensor:
        """Return a state as a flat tensor, divided by `unit`."""
        flat = self.packing.pack(state)
        if flat.dtype != (dtype := self.buffer_dtype):
            flat = flat.to(dtype)
        return flat if self.unit is None else flat / self.unit

    def unpack(self, flat: Tensor) -> State:
        """Return the state of a flat tensor, multiplied by `unit`."""
        flat = flat if self.unit is None else flat * self.unit
        if flat.dtype != self.state_dtype:
            flat = flat.to(self.state_dtype)
        return self.packing.unpack(flat)

    def in_own_units(
        self, point: Tensor, image: Tensor
    ) -> tuple[FixedPointProblem, Tensor, Tensor]:
        """The problem, a point and its image in units in which norms and products are safe.

        They are those of the numbers themselves unless a row is extremely small or large.
        """
        unit = row_units(point, image)
        if unit is None:
            return self, point, image
        other = copy(self)
        other.unit = unit
        return other, point / unit, image / unit

    @property
    def rounding(self) -> Tensor | None:
        """How well residuals are known, where that matters."""
        if self.unit is None:
            return None
        return row_rounding(self.unit, self.packing.size)

    def in_numbers(self, norms: Tensor) -> Tensor:
        """Norms of the rows, counted in ones."""
        return norms if self.unit is None else norms * self.unit[:, 0]

    def evaluate(self, flat: Tensor) -> Tensor:
        """T(y) of the rows of `flat`."""
        return self.pack(self.step(self.unpack(flat), self.context))

    def in_context(self, context: Context) -> FixedPointProblem:
        """The same problem in another context."""
        other = copy(self)
        other.context = context
        return other

    def with_step(self, step: Callable[[State, Context], State]) -> FixedPointProblem:
        """The same problem, its map computed in another way."""
        other = copy(self)
        other.step = step
        return other

    def lifted(self) -> FixedPointProblem:
        """The same problem in float64, where the device has it; `step` stays as it is."""
        if self.potential is None or self.state_dtype == torch.float64 or self.device_type == "mps":
            return self
        context = [t.double() if t.is_floating_point() else t for t in self.context.tensors()]
        other = self.in_context(self.context.replace(context))
        energy = deepcopy(self.potential.energy).double()
        other.potential = replace(self.potential, energy=energy)
        other.state_dtype = torch.float64
        return other

    def started_at(self, state: State) -> FixedPointProblem:
        """The same problem with another start, and with nothing left to refresh."""
        other = copy(self)
        other.start, other.refresh = state, None
        return other

    def refreshed(self, image: Tensor) -> FixedPointProblem:
        """The problem with its context renewed at the state `image`."""
        if self.refresh is None:
            return self
        return self.in_context(self.refresh(self.unpack(image), self.context))

    def block(self, rows: slice) -> FixedPointProblem:
        """The problem of some samples, from their starts."""
        start = map_state(lambda tensor: tensor[rows], self.start)
        return replace(self, context=self.context.keep(rows), start=start)

    def keep(self, rows: Tensor) -> FixedPointProblem:
        """The problem of some rows only."""
        kept = self.in_context(self.context.keep(rows))
        kept.unit = None if self.unit is None else self.unit[rows]
        return kept
