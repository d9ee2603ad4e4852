"""Input optimization as one problem: z = T(z; x), its adjoint, and the gradient in x."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equilibria.context import (
    Context,
    Packing,
    State,
    map_state,
    state_tensors,
    unflatten_state,
)
from equilibria.equilibrium.layer import in_fastest_format
from equilibria.inputs.joint.checks import check_model, check_repeats, checked_losses
from equilibria.inputs.joint.members import Members
from equilibria.inputs.joint.region import Region
from equilibria.solvers import FixedPointProblem, LinearSolution, Solution, gmres

Loss = Callable[[Tensor], Tensor]
"""From the model's outputs to one number a sample."""
Penalty = Callable[[Tensor], Tensor]
"""From the inputs to one number an input."""


@dataclass
class Effort:
    """What was computed so far, in calls for the whole batch."""

    evaluations: int = 0
    vjps: int = 0
    check_evaluations: int = 0


@dataclass(frozen=True)
class Reading:
    """One evaluation of T with one pull-back: all three rows of Eq. 11, without step sizes."""

    image: Tensor
    """T(z; x), one row a sample."""
    adjoint: Tensor
    """Jᵀμ + ∂ℓ/∂z, one row a sample."""
    gradient: Tensor
    """∂/∂x of ℓ + μᵀT, one row a problem."""
    loss: Tensor
    """ℓ of each problem at this z, converged or not."""


class InputProblem:
    """minimize Σ ℓ(head(z*), x) over x for each problem, z* = T(z*; x).

    z and μ have one row a sample, x one row a problem: the samples of a group share their x.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        x0: Tensor,
        region: Region,
        members: Members,
        penalty: Penalty | None,
    ) -> None:
        self.model = model
        self.stem, self.layer, self.head = check_model(model)
        self.loss = loss
        self.penalty = penalty
        self.region = region
        self.members = members
        self.input_shape = x0.shape
        self.effort = Effort()
        context, injected = check_repeats(model, lambda: self.inject(x0.flatten(1)))
        self.zero_state = map_state(
            lambda t: t.detach(), self.layer.cell.initial_state(injected, context)
        )
        self.packing = Packing.of(self.zero_state)
        self.dtype = state_tensors(self.zero_state)[0].dtype

    def inject(self, x: Tensor) -> tuple[Context, Tensor]:
        """The context of the inputs `x` (flat rows), in the graph of x and the parameters."""
        shaped = self.members.spread(x.reshape(-1, *self.input_shape[1:]))
        injected = in_fastest_format(self.stem(shaped))
        return self.layer.cell.inject(injected), injected

    def zeros(self) -> Tensor:
        return self.packing.pack(self.zero_state)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors of a state as one row a sample."""
        return self.packing.pack(unflatten_state(self.zero_state, tensors))

    def leaves(self, z: Tensor) -> State:
        """The state of the rows `z`, to differentiate in."""
        return map_state(lambda t: t.detach().requires_grad_(), self.packing.unpack(z))

    def at(self, x: Tensor, scale: Tensor) -> Site:
        """The problem at one x, its loss multiplied by `scale` for each problem."""
        return Site(self, x, scale)

    def losses(self, state: State, context: Context, x: Tensor) -> Tensor:
        """ℓ of each problem at a state, converged or not."""
        outputs = self.head(self.layer.cell.output(state, context))
        members = self.members
        values = checked_losses(self.loss(outputs), outputs, members.samples, "loss")
        total = members.collect(values)
        if self.penalty is not None:
            extra = self.penalty(x.reshape(-1, *self.input_shape[1:]))
            total = total + checked_losses(extra, x, members.problems, "penalty")
        return total

    @torch.no_grad()
    def solve(self, x: Tensor, start: Tensor | None, *, tolerance: float) -> tuple[Tensor, Tensor]:
        """The equilibrium at x for a check of its loss, and the relative residual a sample."""
        allowed = max(self.layer.solver.max_iterations, 500)
        solution = self._solved(self.inject(x)[0], start, tolerance, allowed)
        self.effort.check_evaluations += solution.evaluations
        return self.packing.pack(solution.state), solution.residual

    @torch.no_grad()
    def solve_at(
        self,
        context: Context,
        start: Tensor | None,
        *,
        tolerance: float,
        max_iterations: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The equilibrium of a context as a part of the search, and its relative residual."""
        allowed = max_iterations or self.layer.solver.max_iterations
        solution = self._solved(context, start, tolerance, allowed)
        self.effort.evaluations += solution.evaluations
        return self.packing.pack(solution.state), solution.residual

    def _solved(
        self, context: Context, start: Tensor | None, tolerance: float, max_iterations: int
    ) -> Solution:
        """By the layer's own solver."""
        solver = replace(self.layer.solver, tolerance=tolerance, max_iterations=max_iterations)
        first = self._zero_start(context) if start is None else self.packing.unpack(start.clone())
        return solver.solve(
            FixedPointProblem(
                step=self.layer.cell.step,
                context=context,
                start=first,
                monotone=self.layer.cell.monotone,
                contraction=self.layer.cell.contraction_limit,
            )
        )

    def _zero_start(self, context: Context) -> State:
        """Where a layer starts: at T(0) where that costs nothing and is finite, or at zero."""
        first = self.layer.cell.first_image(context)
        if first is None:
            return map_state(torch.clone, self.zero_state)
        return map_state(lambda t: t.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), first)

    @torch.no_grad()
    def loss_at(self, x: Tensor, z: Tensor) -> Tensor:
        context, _ = self.inject(x)
        return self.losses(self.packing.unpack(z), context, x)


class Site:
    """The problem at one x: `inject` runs once, however often z and μ are swept."""

    def __init__(self, problem: InputProblem, x: Tensor, scale: Tensor) -> None:
        self.problem = problem
        self.scale = scale
        with torch.enable_grad():
            self.x = x.detach().requires_grad_()
            self.context, _ = problem.inject(self.x)

    def unit_scale(self, z: Tensor) -> Tensor:
        """1/‖∂ℓ/∂z‖ of each problem, which makes μ of the order of 1 whatever the loss's unit."""
        problem = self.problem
        with torch.enable_grad():
            state = problem.leaves(z)
            total = problem.losses(state, self.context, self.x).sum()
        slope = torch.autograd.grad(
            total, state_tensors(state), retain_graph=True, materialize_grads=True
        )
        size = problem.members.norm(problem.pack(slope))
        usable = (size > 0) & torch.isfinite(size)
        return torch.where(usable, 1 / torch.where(usable, size, 1.0), 1.0)

    @torch.no_grad()
    def image(self, z: Tensor) -> Tensor:
        """T(z; x) alone."""
        self.problem.effort.evaluations += 1
        cell, packing = self.problem.layer.cell, self.problem.packing
        return packing.pack(cell.step(packing.unpack(z), self.context))

    def linearize(self, z: Tensor) -> Linearization:
        """One evaluation of T and of the loss, ready for pull-backs."""
        return Linearization(self, z)


class Linearization:
    """T and the loss at one (z, x): any number of pull-backs share the evaluation."""

    def __init__(self, site: Site, z: Tensor) -> None:
        self.problem = problem = site.problem
        self.x = site.x
        problem.effort.evaluations += 1
        with torch.enable_grad():
            state = problem.leaves(z)
            self.states = state_tensors(state)
            self.images = state_tensors(problem.layer.cell.step(state, site.context))
            losses = problem.losses(state, site.context, self.x)
            total = (losses * site.scale).sum()
        *slope, self.direct = torch.autograd.grad(
            total, (*self.states, self.x), retain_graph=True, materialize_grads=True
        )
        self.slope = problem.pack(slope)
        """∂ℓ/∂z, one row a sample."""
        self.image = problem.pack(self.images).detach()
        self.loss = losses.detach()

    def pull(self, mu: Tensor) -> Tensor:
        """Jᵀμ + ∂ℓ/∂z; the evaluation can be pulled through again."""
        return self._pulled(mu, self.states, keep=True)[0] + self.slope

    def reading(self, mu: Tensor) -> Reading:
        """The last pull-back: the gradient in x as well."""
        pulled, gradient = self._pulled(mu, (*self.states, self.x), keep=False)
        assert gradient is not None
        return Reading(self.image, pulled + self.slope, gradient + self.direct, self.loss)

    def solve_adjoint(
        self, start: Tensor | None, *, tolerance: float, max_iterations: int = 200
    ) -> LinearSolution:
        """μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z."""
        return gmres(
            lambda vector: vector - self._pulled(vector, self.states, keep=True)[0],
            self.slope,
            start=start,
            tolerance=tolerance,
            max_iterations=max_iterations,
        )

    def _pulled(
        self, mu: Tensor, wanted: tuple[Tensor, ...], *, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.problem.effort.vjps += 1
        cotangents = state_tensors(self.problem.packing.unpack(mu))
        found = torch.autograd.grad(
            self.images, wanted, cotangents, retain_graph=keep, materialize_grads=True
        )
        count = len(self.states)
        return self.problem.pack(found[:count]), found[count] if len(found) > count else None
