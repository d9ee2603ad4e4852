"""Gradients of what was optimized, with respect to the model's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equilibria.context import State
from equilibria.context.state import map_state, state_tensors
from equilibria.inputs.input_result import InputResult
from equilibria.inputs.problem import InputProblem
from equilibria.solvers import ConvergenceError, gmres

Outer = Literal["implicit", "detached"]


def optimal_value(result: InputResult) -> Tensor:
    """The optimal loss of each problem, differentiable in the model's parameters (Eq. 19).

    Its value is ℓ at the result; its gradient is that of ℓ + μᵀ(T − z) at fixed (x, z, μ). By the
    envelope theorem that is the gradient of min_x ℓ, whatever the constraint, where x is optimal;
    elsewhere it is the gradient of ℓ at that x. For training by the same loss, or by its negative,
    as adversarial training does. Needs the polished μ: with that of a search that was cut short
    the gradient can point the wrong way.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=2)
        >>> eq.inputs.optimal_value(found).sum().backward()
        >>> bool(model.head.classifier.weight.grad.abs().sum() > 0)
        True
    """
    problem = result.problem
    state, mu = _detached(result.state), _detached(result.adjoint)
    context = problem.inject(result.x)
    image = problem.layer.cell.step(state, context)
    gap = map_state(lambda i, m: m * (i - i.detach()), image, mu)
    pairing = problem.groups.sum(problem.packing.pack(gap).sum(dim=1))
    return problem.losses(state, context, result.x) + pairing


def optimal_input(
    result: InputResult,
    outer: Outer = "implicit",
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 500,
    strict: bool = True,
) -> Tensor:
    """The optimized x, attached to the model's parameters, for any outer loss.

    "implicit" differentiates the KKT conditions (Eqs. 14 to 17), active constraints included, by
    one linear solve in the backward pass; it needs a converged result, second derivatives of the
    map and the loss, and a minimum that is not flat. "detached" takes x as a constant. What the
    outer loss depends on besides x, such as model(x), differentiates as always:

        x = optimal_input(result)
        outer_loss(model(x)).backward()

    The gradient is of first order. strict: raise where the linear solve does not converge, or
    where the inner problem has not.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> found = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=2)
        >>> eq.inputs.optimal_input(found, "detached").requires_grad
        False
    """
    if outer == "detached":
        return result.x.detach()
    if outer != "implicit":
        raise ValueError(f"outer must be 'implicit' or 'detached', not {outer!r}")
    if strict and not bool(result.converged.all()):
        raise ConvergenceError(
            "the implicit gradient of an optimum needs one that has converged: "
            f"{result.summary()}. Pass strict=False to differentiate all the same"
        )
    system = _KKT(result)
    with torch.enable_grad():
        residual = system.residual(system.point, create_graph=True)

    def solve(rhs: Tensor) -> Tensor:
        found = gmres(
            system.transposed(),
            rhs,
            tolerance=max(tolerance, 10 * torch.finfo(rhs.dtype).eps),
            max_iterations=max_iterations,
            restart=min(max_iterations, rhs.shape[1], 200),
        )
        if strict and not bool(found.converged.all()):
            raise ConvergenceError(f"implicit differentiation of the optimum: {found.summary()}")
        return found.value

    attached: Tensor = _SolveInBackward.apply(residual, solve)  # type: ignore[no-untyped-call]
    inputs = attached[:, -result.x[0].numel() :]
    return result.x.detach() + (inputs - inputs.detach()).reshape(result.x.shape)


class _KKT:
    """The map F whose fixed point is the optimum v = (z, μ, x), one row per problem.

    F(v) = (T(z; x), Jᵀμ + ∂ℓ/∂z, Π(x − a ∂/∂x(ℓ + μᵀT))).
    """

    def __init__(self, result: InputResult) -> None:
        self.problem: InputProblem = result.problem
        groups, packing = self.problem.groups, self.problem.packing
        z, mu = (packing.pack(_detached(s)) for s in (result.state, result.adjoint))
        # In units in which μ is about as large as z, whatever the unit of the loss.
        size = groups.norm(mu)
        self.unit = torch.where(size > 0, groups.norm(z).clamp_min(1e-30) / size, 1.0)
        mu = mu * groups.to_samples(self.unit)[:, None]
        self.point = groups.join_all(z, mu, result.x.detach().flatten(1))

    def residual(self, point: Tensor, *, create_graph: bool) -> Tensor:
        """F(v), in the graph of v and of the parameters."""
        problem, groups = self.problem, self.problem.groups
        z_rows, mu_rows, x = groups.split_all(point, self.problem.input_shape[1:].numel())
        if not point.requires_grad:
            # A derivative in z and x is part of F itself.
            z_rows, x = z_rows.detach().requires_grad_(), x.detach().requires_grad_()
        state: State = problem.packing.unpack(z_rows)
        shaped = x.reshape(problem.input_shape)
        context = problem.inject(shaped)
        image = problem.layer.cell.step(state, context)
        losses = problem.losses(state, context, shaped)
        mu = state_tensors(problem.packing.unpack(mu_rows))
        pairing = [(i * m).sum() for i, m in zip(state_tensors(image), mu, strict=True)]
        lagrangian = (losses * self.unit).sum() + torch.stack(pairing).sum()
        adjoint, gradient = torch.autograd.grad(
            lagrangian, (z_rows, x), create_graph=create_graph, materialize_grads=True
        )
        moved = problem.region.project(x - gradient)
        return groups.join_all(problem.packing.pack(image), adjoint, moved)

    def transposed(self) -> Callable[[Tensor], Tensor]:
        """Apply u ↦ (I − ∂F/∂v)ᵀ u."""
        with torch.enable_grad():
            leaf = self.point.detach().requires_grad_()
            image = self.residual(leaf, create_graph=True)

        def operator(u: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(image, leaf, u, retain_graph=True)
            return u - pulled

        return operator


class _SolveInBackward(torch.autograd.Function):
    """The identity, whose gradient passes through a linear solve."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return residual.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.solve(gradient), None


def _detached(state: State) -> State:
    return map_state(lambda tensor: tensor.detach(), state)
