"""Gradients of optimal inputs and optimal losses in the model's parameters."""

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
    """Return the optimal loss of each problem, differentiable in the parameters (JIIO Eq. 19).

    The value is the loss ℓ at the result. The gradient is that of ℓ + μᵀ(T − z) at fixed input x,
    equilibrium z of the map T, and adjoint μ. If x is optimal, this is the gradient of min_x ℓ for
    any constraint, by the envelope theorem; otherwise it is the gradient of ℓ at x. Use it to train
    with the loss of the search or its negative, as adversarial training does. It needs
    `polish=True`: with the μ of a search that did not converge the gradient can have the wrong
    direction.

    Args:
        result: Result of `optimize_input`.

    Returns:
        Losses, shape (problems,).

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> result = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=2)
        >>> eq.inputs.optimal_value(result).sum().backward()
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
    """Return the optimized x, differentiable in the model's parameters, for any outer loss.

    Other dependencies of the outer loss on the parameters are differentiated as usual:

        x = optimal_input(result)
        outer_loss(model(x)).backward()

    Args:
        result: Result of `optimize_input`.
        outer: "implicit" differentiates the KKT conditions (JIIO, Eqs. 14 to 17), including active
            constraints, by one linear solve in the backward pass. It needs a converged result,
            second derivatives of the map and the loss, and a minimum that is not flat. "detached"
            treats x as a constant.
        tolerance: Relative residual of the linear solve.
        max_iterations: Limit of the iterations of the linear solve.
        strict: Raise an error if the search or the linear solve did not converge.

    Returns:
        x in the shape of x0. It can be differentiated once.

    Raises:
        ConvergenceError: If `strict` is set and the search has not converged, or, in the backward
            pass, the linear solve has not.

    Examples:
        >>> model, image = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> result = eq.optimize_input(model, lambda y: y[:, 3], image, iterations=2)
        >>> eq.inputs.optimal_input(result, "detached").requires_grad
        False
    """
    if outer == "detached":
        return result.x.detach()
    if outer != "implicit":
        raise ValueError(f"outer must be 'implicit' or 'detached', got {outer!r}")
    if strict and not bool(result.converged.all()):
        raise ConvergenceError(
            f"the implicit gradient needs a converged search: {result.summary()}. Pass "
            "strict=False to compute the gradient anyway"
        )
    system = _KKT(result)
    with torch.enable_grad():
        residual = system.residual(system.point, create_graph=True)

    def solve(rhs: Tensor) -> Tensor:
        solution = gmres(
            system.transposed(),
            rhs,
            tolerance=max(tolerance, 10 * torch.finfo(rhs.dtype).eps),
            max_iterations=max_iterations,
            restart=min(max_iterations, rhs.shape[1], 200),
        )
        if strict and not bool(solution.converged.all()):
            raise ConvergenceError(f"implicit differentiation of the optimum: {solution.summary()}")
        return solution.value

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
        # Scale the loss such that μ is about as large as z.
        size = groups.norm(mu)
        self.unit = torch.where(size > 0, groups.norm(z).clamp_min(1e-30) / size, 1.0)
        mu = mu * groups.to_samples(self.unit)[:, None]
        self.point = groups.join_all(z, mu, result.x.detach().flatten(1))

    def residual(self, point: Tensor, *, create_graph: bool) -> Tensor:
        """Evaluate the KKT conditions' fixed-point map F at a point v = (z, μ, x).

        Args:
            point: The point v, one row per problem. If it requires a gradient, F is differentiable
                in it.
            create_graph: Whether the derivatives inside F can be differentiated again, in v and in
                the parameters.

        Returns:
            F(v), in the shape of v.
        """
        problem, groups = self.problem, self.problem.groups
        z_rows, mu_rows, x = groups.split_all(point, self.problem.input_shape[1:].numel())
        if not point.requires_grad:
            # F itself contains derivatives in z and x.
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
        """Return the operator u ↦ (I − ∂F/∂v)ᵀ u."""
        with torch.enable_grad():
            leaf = self.point.detach().requires_grad_()
            image = self.residual(leaf, create_graph=True)

        def operator(u: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(image, leaf, u, retain_graph=True)
            return u - pulled

        return operator


class _SolveInBackward(torch.autograd.Function):
    """Identity whose backward pass solves a linear system."""

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
