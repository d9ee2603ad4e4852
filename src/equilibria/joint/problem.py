"""Input optimisation as one problem: z = T(z; x), its adjoint, and the gradient in x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints import LinearSolution, gmres
from equilibria.context import Context, Packing, State, state_tensors, unflatten_state
from equilibria.equilibrium.layer import in_fastest_format
from equilibria.joint.checks import check_model, check_repeats, checked_losses
from equilibria.joint.members import Members
from equilibria.joint.region import Region
from equilibria.solvers import FixedPointProblem

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
    gradient: Tensor | None
    """∂/∂x of ℓ + μᵀT, one row a problem."""
    loss: Tensor
    """ℓ of each problem at this z, converged or not."""


class InputProblem:
    """minimise Σ ℓ(head(z*), x) over x for each problem, z* = T(z*; x).

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
        with torch.no_grad():
            context, injected = self.inject(x0.flatten(1))
            self.zero_state = self.layer.cell.initial_state(injected, context)
        check_repeats(model, lambda: self.inject(x0.flatten(1))[0])
        self.packing = Packing.of(self.zero_state)
        self.dtype = state_tensors(self.zero_state)[0].dtype

    def inject(self, x: Tensor) -> tuple[Context, Tensor]:
        """The context of the inputs `x` (flat rows), in the graph of x and the parameters."""
        shaped = self.members.spread(x.reshape(-1, *self.input_shape[1:]))
        injected = in_fastest_format(self.stem(shaped))
        return self.layer.cell.inject(injected), injected

    def zeros(self) -> Tensor:
        return self.packing.pack(self.zero_state)

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
    def solve(
        self, x: Tensor, start: Tensor | None, *, tolerance: float, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The equilibrium at x by the layer's own solver, and the relative residual a sample."""
        context, _ = self.inject(x)
        solver = replace(
            self.layer.solver,
            tolerance=tolerance,
            max_iterations=max(self.layer.solver.max_iterations, 500 if check else 0),
        )
        first = self.zeros() if start is None else start
        solution = solver.solve(
            FixedPointProblem(
                step=self.layer.cell.step,
                context=context,
                start=self.packing.unpack(first.clone()),
                monotone=self.layer.cell.monotone,
                contraction=self.layer.cell.contraction_limit,
            )
        )
        if check:
            self.effort.check_evaluations += solution.evaluations
        else:
            self.effort.evaluations += solution.evaluations
        return self.packing.pack(solution.state), solution.residual

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

    def evaluate(self, z: Tensor, mu: Tensor, *, gradient: bool) -> Reading:
        """T, Jᵀμ + ∂ℓ/∂z and, where asked for, the gradient in x: together, once."""
        problem = self.problem
        problem.effort.evaluations += 1
        problem.effort.vjps += 1
        with torch.enable_grad():
            states, image, losses = self._forward(z)
            pairing = [
                (a * m).sum()
                for a, m in zip(image, state_tensors(problem.packing.unpack(mu)), strict=True)
            ]
            lagrangian = (losses * self.scale).sum() + torch.stack(pairing).sum()
        wanted = [*states, self.x] if gradient else states
        found = torch.autograd.grad(lagrangian, wanted, materialize_grads=True)
        return Reading(
            image=self._pack(image).detach(),
            adjoint=self._pack(found[: len(states)]),
            gradient=found[-1] if gradient else None,
            loss=losses.detach(),
        )

    def solve_adjoint(
        self, z: Tensor, start: Tensor | None, *, tolerance: float, max_iterations: int = 200
    ) -> LinearSolution:
        """μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z at a given z."""
        problem = self.problem
        problem.effort.evaluations += 1
        with torch.enable_grad():
            states, image, losses = self._forward(z)
            scaled = (losses * self.scale).sum()
        rhs = torch.autograd.grad(scaled, states, retain_graph=True, materialize_grads=True)

        def operator(vector: Tensor) -> Tensor:
            cotangents = state_tensors(problem.packing.unpack(vector))
            pulled = torch.autograd.grad(
                image, states, cotangents, retain_graph=True, materialize_grads=True
            )
            return vector - self._pack(pulled)

        solution = gmres(
            operator,
            self._pack(rhs),
            start=start,
            tolerance=tolerance,
            max_iterations=max_iterations,
        )
        problem.effort.vjps += 1 + solution.evaluations
        return solution

    def _forward(self, z: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...], Tensor]:
        problem = self.problem
        unpacked = problem.packing.unpack(z)
        states = [tensor.detach().requires_grad_() for tensor in state_tensors(unpacked)]
        state = unflatten_state(unpacked, states)
        image = state_tensors(problem.layer.cell.step(state, self.context))
        return states, image, problem.losses(state, self.context, self.x)

    def _pack(self, tensors: Any) -> Tensor:
        return self.problem.packing.pack(unflatten_state(self.problem.zero_state, tensors))
