"""Fixed-point problems for solvers: a map on the rows of one buffer."""

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

    Args:
        energy: Energy E.
        activation: Activation σ, the proximal operator of f.
        alpha, damping: Parameters of the map (see `EnergyCell`).
        is_convex: Whether G is known to be convex; every stationary point is then a minimum.
    """

    energy: Energy
    activation: Activation
    alpha: float = 1.0
    damping: float = 1.0
    is_convex: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the map is σ(−∇E), without damping."""
        return self.alpha == 1 and self.damping == 1

    def evaluate(self, problem: FixedPointProblem, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return E(y; x) of each row, and −∇E(y; x)."""
        state = problem.unpack(y)
        value = self.energy.value(state, problem.context).reshape(-1)
        return value, problem.pack(self.energy.descent(state, problem.context))

    def image(self, y: Tensor, descent: Tensor) -> Tensor:
        """Return T(y), given −∇E(y; x)."""
        mapped = self.activation(y + self.damping * (descent - y))
        return y + self.alpha * (mapped - y)

    def hessian_product(self, problem: FixedPointProblem, y: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the function v ↦ ∇²E(y; x) v, computed by autograd."""
        return self.linearize(problem, y)[1]

    def linearize(
        self, problem: FixedPointProblem, y: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return −∇E(y; x) of each row and v ↦ ∇²E(y; x) v, from one evaluation."""
        with torch.enable_grad():
            point = y.detach().requires_grad_()
            descent = problem.pack(self.energy.descent(problem.unpack(point), problem.context))

        def product(v: Tensor) -> Tensor:
            if not descent.requires_grad:  # E is linear
                return torch.zeros_like(v)
            (pulled,) = torch.autograd.grad(
                descent, point, v, retain_graph=True, materialize_grads=True
            )
            return -pulled

        return descent.detach(), product


@dataclass
class FixedPointProblem:
    """Problem of finding y with y = step(y, context), one problem per sample.

    The context contains the tensors that the map reads besides the state y. In the first
    `refresh_until` iterations, `refresh` computes a new context from the state, for example signs
    or perturbations that depend on it. After them the map is fixed.

    Attributes:
        step: The map, called as `step(state, context)`.
        context: Tensors that the map reads besides the state.
        start: State at which the solve starts.
        couples_batch: Whether the samples of the batch form one problem.
        separable: Whether a subset of the samples can be solved without the others, with the same
            result.
        refresh: Returns a new context, called as `refresh(state, context)`; None: the map is fixed.
        refresh_until: Number of iterations with `refresh`.
        monotone: Whether the Jacobian is symmetric, in a plain or weighted inner product, without
            negative eigenvalues. The step is then a gradient step, which momentum accelerates.
        contraction: Proven contraction factor of the map, if one is known without computation.
        solved_once: Whether the solver may release the start, which is as large as the state.
        remedy: Advice for failed solves.
        trace: Iterations to record: True for residuals, "states" also for states.
        unit: Unit of the numbers of each row, shape (rows, 1); None if it is 1.
        records_step: Whether every evaluation must call `step` because the caller records calls.
        potential: Hidden objective whose stationary points are the fixed points, if there is one.

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
    couples_batch: bool = False
    separable: bool = False
    refresh: Callable[[State, Context], Context] | None = None
    refresh_until: int = 0
    monotone: bool = False
    contraction: float | None = None
    solved_once: bool = False
    remedy: str = ""
    trace: bool | Literal["states"] = False
    unit: Tensor | None = None
    records_step: bool = False
    potential: Potential | None = None

    def __post_init__(self) -> None:
        first = state_tensors(self.start)[0]
        self.packing = Packing.of(self.start, self.couples_batch)
        self.state_dtype = first.dtype
        self.device_type = first.device.type

    @property
    def buffer_dtype(self) -> torch.dtype:
        """Type of iterates and residuals: that of the state, but at least float32."""
        small = self.state_dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if small else self.state_dtype

    @property
    def epsilon(self) -> float:
        """Machine epsilon of the type in which the map computes."""
        if torch.is_autocast_enabled(self.device_type):
            return torch.finfo(torch.get_autocast_dtype(self.device_type)).eps
        return torch.finfo(self.state_dtype).eps

    def take_start(self) -> Tensor:
        """Return the packed start; a problem that is solved once releases its own copy."""
        flat = self.pack(self.start)
        if self.solved_once:
            nothing = (tensor.new_empty(0) for tensor in state_tensors(self.start))
            self.start = unflatten_state(self.start, nothing)
        return flat

    def pack(self, state: State) -> Tensor:
        """Return a state as a flat tensor, shape (problems, size), divided by `unit`."""
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
        """Return the problem, y and T(y) in units that avoid overflow and underflow.

        The units are 1 unless a row is extremely small or large.

        Args:
            point: y, shape (rows, size).
            image: T(y), shape (rows, size).
        """
        unit = row_units(point, image)
        if unit is None:
            return self, point, image
        other = copy(self)
        other.unit = unit
        return other, point / unit, image / unit

    @property
    def rounding(self) -> Tensor | None:
        """Rounding error of the residuals near the smallest normal number; None if `unit` is 1."""
        if self.unit is None:
            return None
        return row_rounding(self.unit, self.packing.size)

    def in_numbers(self, norms: Tensor) -> Tensor:
        """Return norms of rows in the original units."""
        return norms if self.unit is None else norms * self.unit[:, 0]

    def evaluate(self, flat: Tensor) -> Tensor:
        """Return T(y) for the rows of `flat`."""
        return self.pack(self.step(self.unpack(flat), self.context))

    def in_context(self, context: Context) -> FixedPointProblem:
        """Return the problem with other tensors that the map reads besides the state."""
        other = copy(self)
        other.context = context
        return other

    def with_step(self, step: Callable[[State, Context], State]) -> FixedPointProblem:
        """Return the problem with another implementation of the map."""
        other = copy(self)
        other.step = step
        return other

    def lifted(self) -> FixedPointProblem:
        """Return the problem in float64 if the device supports it; `step` does not change."""
        if self.potential is None or self.state_dtype == torch.float64 or self.device_type == "mps":
            return self
        context = [t.double() if t.is_floating_point() else t for t in self.context.tensors()]
        other = self.in_context(self.context.replace(context))
        energy = deepcopy(self.potential.energy).double()
        other.potential = replace(self.potential, energy=energy)
        other.state_dtype = torch.float64
        return other

    def started_at(self, state: State) -> FixedPointProblem:
        """Return the problem with another start, whose map no longer changes (no `refresh`)."""
        other = copy(self)
        other.start, other.refresh = state, None
        return other

    def refreshed(self, image: Tensor) -> FixedPointProblem:
        """Return the problem whose map is updated to the current iterate by `refresh`.

        Args:
            image: The iterate, packed, shape (rows, size).
        """
        if self.refresh is None:
            return self
        return self.in_context(self.refresh(self.unpack(image), self.context))

    def block(self, rows: slice) -> FixedPointProblem:
        """Return the problem of a slice of the samples."""
        start = map_state(lambda tensor: tensor[rows], self.start)
        return replace(self, context=self.context.keep(rows), start=start)

    def keep(self, rows: Tensor) -> FixedPointProblem:
        """Return the problem of a subset of the rows; `start` is not reduced."""
        kept = self.in_context(self.context.keep(rows))
        kept.unit = None if self.unit is None else self.unit[rows]
        return kept
