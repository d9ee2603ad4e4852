"""The exact gradient of an equilibrium, by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from equilibria.context import State
from equilibria.context.state import Packing, batch_size, state_tensors, unflatten_state
from equilibria.gradients.base import Backward, GradientRule, Map, Symmetry, needs_graph
from equilibria.gradients.local_step import LocalStep, StepRecipe
from equilibria.operators.norm_control import is_wrapped
from equilibria.registry import check_at_least_one, check_choice, check_tolerances
from equilibria.solvers import FixedPointProblem, Solution
from equilibria.solvers._cpu import concatenated, sample_blocks, solve_in_blocks
from equilibria.solvers.linear.base import LinearMap, LinearSolution
from equilibria.solvers.linear.bicgstab import bicgstab
from equilibria.solvers.linear.conjugate_gradients import conjugate_gradients
from equilibria.solvers.linear.gmres import gmres
from equilibria.solvers.method import Method

LARGEST_BASIS = 2**31
"""Largest basis of GMRES in bytes; larger problems use BiCGSTAB."""

RELATIVE_TOLERANCE = 0.1
"""Default tolerance of the backward solve, in units of the forward tolerance."""

LinearMethod = Literal["auto", "cg", "gmres", "bicgstab"]


@dataclass(frozen=True)
class Implicit(GradientRule):
    """The exact gradient dy*/dθ = (I − J)⁻¹ ∂T/∂θ, by one linear solve in the backward pass.

    J = ∂T/∂y is the Jacobian of the map T at the equilibrium y*, θ a parameter or input, and ℓ the
    loss. The system is (I − Jᵀ) u = ∂ℓ/∂y. The gradient is exact up to the tolerances of both
    solves, the memory does not grow with the iterations, and derivatives of every order are
    supported. If the cell declares a symmetry, the linear solver is conjugate gradients (for
    energies in the inner product weighted by σ′), with GMRES as the fallback. Otherwise it is
    GMRES.

    Args:
        tolerance: Relative residual of the linear solve, at least the machine epsilon. None: a
            tenth of the forward tolerance.
        max_iterations: Largest number of products with the Jacobian.
        method: "auto" follows the symmetry of the cell and the size of the batch. "bicgstab" stores
            8 vectors, GMRES up to `restart` + 1, but needs more products with the Jacobian.
        restart: Number of steps between two restarts of GMRES.
        warm_start: Start from the last backward solution if its shape fits. Useful if the same
            samples are differentiated repeatedly, as in input optimization.

    Examples:
        >>> x = torch.tensor([[1.0]], requires_grad=True)
        >>> z = eq.fixed_point(lambda z, x: z / 2 + x, x, gradient=eq.Implicit())  # z = 2x
        >>> torch.autograd.grad(z.sum(), x)
        (tensor([[2.]]),)
    """

    exact: ClassVar[bool] = True
    tolerance: float | None = None
    max_iterations: int = 200
    method: LinearMethod = "auto"
    restart: int = 30
    warm_start: bool = False

    def __post_init__(self) -> None:
        check_tolerances(tolerance=self.tolerance)
        check_at_least_one(max_iterations=self.max_iterations, restart=self.restart)
        check_choice(get_args(LinearMethod), method=self.method)

    def equilibrium(
        self, cell: Map, problem: FixedPointProblem, solver: Method, backward: Backward
    ) -> tuple[State, Solution]:
        solution = solve_in_blocks(solver, problem)
        context = solution.context
        if not needs_graph(cell, context):
            return solution.state, solution
        assert isinstance(cell, nn.Module)
        parameters = dict(cell.named_parameters())
        states = state_tensors(solution.state)
        device = states[0].device.type
        recipe = StepRecipe(
            cell=cell,
            context=context.skeleton(),
            packing=Packing.of(solution.state, problem.couples_batch),
            parameter_names=tuple(parameters),
            symmetry=self._symmetry(cell),
            separable=problem.separable and not self.warm_start,
            autocast=partial(
                torch.autocast,
                device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
            ),
        )
        rule = self
        if self.tolerance is None:
            rule = replace(self, tolerance=self.tolerance_with(solver))
        solve = self.linear_solver(rule, recipe, backward, problem.epsilon)
        outputs = _apply(_FixedPoint, solve, *states, *context.tensors(), *parameters.values())
        return unflatten_state(solution.state, outputs), solution

    def linear_solver(
        self, rule: Implicit, recipe: StepRecipe, backward: Backward, epsilon: float
    ) -> LinearSolver:
        """Return the object that solves the systems of one backward pass.

        Args:
            rule: This rule with its tolerance.
            recipe: How to rebuild the step.
            backward: Receives the result of every backward solve.
            epsilon: Machine epsilon of the type in which the map is computed.
        """
        return LinearSolver(rule, recipe, backward, epsilon)

    def tolerance_with(self, solver: Method) -> float:
        """Return the tolerance of the linear solve for a forward solver.

        Args:
            solver: Method of the forward solve.
        """
        return RELATIVE_TOLERANCE * solver.tolerance if self.tolerance is None else self.tolerance

    def _symmetry(self, cell: Map) -> Symmetry:
        if self.method in ("gmres", "bicgstab"):
            return Symmetry.NONE
        if self.method == "cg" and cell.symmetry is Symmetry.NONE:
            raise ValueError(
                f"conjugate gradients need a cell with a symmetry, but {type(cell).__name__} "
                "declares none: use Implicit(method='auto') or method='gmres'"
            )
        return cell.symmetry


@dataclass(frozen=True)
class LinearSolver:
    """Solves (I − Jᵀ) u = g, or (I − J) u = g, at given tensors."""

    rule: Implicit
    recipe: StepRecipe
    backward: Backward
    epsilon: float

    def solve(self, local: LocalStep, rhs: Tensor, *, transposed: bool) -> LinearSolution:
        """Solve one system; the caller passes the result to `backward.record`."""
        if is_wrapped(rhs):
            raise NotImplementedError(
                "the backward pass of an equilibrium does not support batched gradients: remove "
                "vectorize=True or is_grads_batched=True"
            )
        jacobian = local.transposed_product if transposed else local.product
        rhs = rhs.to(torch.promote_types(rhs.dtype, torch.float32))
        weight = None if local.weight is None else local.weight.to(rhs.dtype)
        if local.at_argument and weight is not None:
            return self._solve_at_argument(jacobian, rhs, weight)

        def product(vector: Tensor) -> Tensor:
            return jacobian(vector).to(vector.dtype)

        def operator(vector: Tensor) -> Tensor:
            return vector - product(vector)

        symmetry = self.recipe.symmetry
        # In the weighted case only I − Jᵀ is self-adjoint; I − J occurs in second derivatives.
        adjoint = symmetry is Symmetry.PLAIN or (symmetry is Symmetry.WEIGHTED and transposed)
        return self._run(
            operator, product, rhs, weight, self_adjoint=adjoint, transposed=transposed
        )

    def _solve_at_argument(
        self, jacobian: LinearMap, rhs: Tensor, weight: Tensor
    ) -> LinearSolution:
        """Return Su for (I − HS) u = g: w = S^½u solves the symmetric (I − S^½HS^½) w = S^½g.

        A product costs one with H and two elementwise passes, inner products need no weight, and
        the pull-back through d needs only S^½w. With r the residual of w, that of u = g + HS^½w is
        HS^½r.
        """
        root = weight.sqrt()
        # If S is 0 or 1, as for ReLU, S^½p = p for all iterates p, unless there is a warm start.
        binary = not self.rule.warm_start and torch.equal(root, weight)

        def hessian_product(vector: Tensor) -> Tensor:
            return jacobian(vector if binary else root * vector).to(vector.dtype)

        def operator(vector: Tensor) -> Tensor:
            image = hessian_product(vector)
            # If H is the identity, the image may share its memory with the vector.
            can_overwrite = image.is_contiguous() and not _share_memory(image, vector)
            out = image if can_overwrite else None
            return torch.addcmul(vector, root, image, value=-1, out=out)

        def product(vector: Tensor) -> Tensor:
            return hessian_product(vector) * root

        solution = self._run(
            operator,
            product,
            rhs * root,
            None,
            self_adjoint=True,
            transposed=True,
            relative_to=rhs,
        )
        return replace(solution, value=solution.value * root)

    def pull_back(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return (∂T/∂θ)ᵀu for saved tensors, with u the solution for these gradients.

        Solves in blocks of samples, like the forward pass. Gradients of tensors that the samples
        share are summed over the blocks.

        Args:
            tensors: Saved tensors.
            gradients: ∂ℓ/∂y.
            needed: Which of the saved tensors need a gradient.
        """
        recipe = self.recipe
        state = recipe.state(tensors)
        blocks = sample_blocks(state) if recipe.separable else [slice(0, batch_size(state))]
        if len(blocks) == 1:
            pulled, solution = self.pull_back_block(tensors, gradients, needed)
            self.backward.record(solution)
            return pulled
        per_sample = recipe.is_per_sample()
        totals: list[Tensor | None] = [None] * len(tensors)
        solutions = []
        for rows in blocks:
            pairs = zip(tensors, per_sample, strict=True)
            block = [tensor[rows] if has_rows else tensor for tensor, has_rows in pairs]
            pulled, solution = self.pull_back_block(block, [g[rows] for g in gradients], needed)
            solutions.append(solution)
            for i, piece in enumerate(pulled):
                total = totals[i]
                if piece is None:
                    continue
                if per_sample[i]:
                    total = torch.zeros_like(tensors[i]) if total is None else total
                    total[rows] = piece
                else:
                    total = piece if total is None else total + piece
                totals[i] = total
        self.backward.record(_joined(solutions))
        return totals

    def pull_back_block(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor | None], LinearSolution]:
        """Return the gradients of one block, and its solution without the value."""
        recipe = self.recipe
        local = LocalStep(recipe, tensors, create_graph=False, through_argument=True)
        rhs = recipe.packing.pack(unflatten_state(recipe.state(tensors), gradients))
        solution = self.solve(local, rhs, transposed=True)
        pulled = local.pull_back(_unpack(recipe, solution.value, gradients), needed)
        return pulled, replace(solution, value=solution.value.new_empty(0))

    def _run(
        self,
        operator: LinearMap,
        jacobian: LinearMap,
        rhs: Tensor,
        weight: Tensor | None,
        *,
        self_adjoint: bool,
        transposed: bool,
        relative_to: Tensor | None = None,
    ) -> LinearSolution:
        """Solve A u = g, A = I − J, with a warm start if the rule has one."""
        log = self.backward.log
        start = log.start(rhs, transposed=transposed) if self.rule.warm_start else None
        solution = self._choose_and_run(
            operator, jacobian, rhs, weight, start, self_adjoint, relative_to
        )
        if self.rule.warm_start:
            log.remember(solution.value, transposed=transposed)
        return solution

    def _choose_and_run(
        self,
        operator: LinearMap,
        jacobian: LinearMap,
        rhs: Tensor,
        weight: Tensor | None,
        start: Tensor | None,
        self_adjoint: bool,
        relative_to: Tensor | None,
    ) -> LinearSolution:
        limits: dict[str, Any] = {
            "tolerance": self.rule.tolerance,
            "max_iterations": self.rule.max_iterations,
            "epsilon": self.epsilon,
            "relative_to": relative_to,
        }
        fallback = ""
        if self_adjoint:
            solution = conjugate_gradients(operator, rhs, weight, start=start, **limits)
            if bool(solution.converged.all()):
                return solution
            start = solution.value
            fallback = f"{solution.method}, then "
        if self.rule.method == "bicgstab" or self._basis_is_too_large(rhs):
            return bicgstab(operator, rhs, start=start, **limits)
        solution = gmres(
            operator, rhs, start=start, restart=self.rule.restart, jacobian=jacobian, **limits
        )
        return replace(solution, method=fallback + solution.method)

    def _basis_is_too_large(self, rhs: Tensor) -> bool:
        basis = rhs.numel() * rhs.element_size() * (self.rule.restart + 1)
        return self.rule.method == "auto" and basis > LARGEST_BASIS


class _FixedPoint(torch.autograd.Function):
    """The identity on y*, with the derivative of y* = T(y*; θ).

    The inputs are the equilibrium (values only), then θ: the context's tensors and the parameters.
    """

    @staticmethod
    def forward(ctx: Any, solver: LinearSolver, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = solver.recipe.state_count
        # Clones make these outputs of the Function; saved as outputs, they carry the dependence of
        # y* on θ into second derivatives.
        outputs = tuple(tensor.clone() for tensor in tensors[:count])
        ctx.solver = solver
        ctx.save_for_backward(*outputs, *tensors[count:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        solver: LinearSolver = ctx.solver
        tensors = ctx.saved_tensors
        recipe = solver.recipe
        needed = [False] * recipe.state_count + list(ctx.needs_input_grad[1 + recipe.state_count :])
        if not torch.is_grad_enabled():
            return None, *solver.pull_back(tensors, gradients, needed)
        local = LocalStep(recipe, tensors, create_graph=True)
        solution = _apply(_LinearSolve, solver, True, *gradients, *tensors)
        return None, *local.pull_back(solution, needed)


class _LinearSolve(torch.autograd.Function):
    """u = (I − J(y; θ)ᵀ)⁻¹ g, or without the transpose, as a function of g, y and θ."""

    @staticmethod
    def forward(
        ctx: Any, solver: LinearSolver, transposed: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        recipe = solver.recipe
        rhs, point = tensors[: recipe.state_count], tensors[recipe.state_count :]
        local = LocalStep(recipe, point, create_graph=False)
        packed = recipe.packing.pack(unflatten_state(recipe.state(point), rhs))
        solution = solver.solve(local, packed, transposed=transposed)
        solver.backward.record(solution)
        outputs = tuple(piece.clone() for piece in _unpack(recipe, solution.value, rhs))
        ctx.solver, ctx.transposed = solver, transposed
        ctx.save_for_backward(*outputs, *point)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        solver: LinearSolver = ctx.solver
        count = solver.recipe.state_count
        solution, point = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        create_graph = torch.is_grad_enabled()
        # With A u = g:  ∂ℓ/∂g = w := A⁻ᵀ ∂ℓ/∂u  and  ∂ℓ/∂(y, θ) = ∂⟨w, J⁽ᵀ⁾u⟩/∂(y, θ).
        adjoint = _apply(_LinearSolve, solver, not ctx.transposed, *gradients, *point)
        left, right = (solution, adjoint) if ctx.transposed else (adjoint, solution)
        needed = ctx.needs_input_grad[2 + count :]
        with torch.enable_grad():
            local = LocalStep(solver.recipe, point, create_graph=create_graph)
            pulled = torch.autograd.grad(
                local.outputs, local.states, left, create_graph=True, materialize_grads=True
            )
            products = [(p * r).sum() for p, r in zip(pulled, right, strict=True)]
            bilinear = torch.stack(products).sum()
            chosen = [x for x, is_needed in zip(local.inputs, needed, strict=True) if is_needed]
            derivatives: tuple[Tensor | None, ...] = (None,) * len(chosen)
            if chosen and bilinear.requires_grad:
                derivatives = torch.autograd.grad(
                    bilinear, chosen, create_graph=create_graph, allow_unused=True
                )
        remaining = iter(derivatives)
        all_derivatives = [next(remaining) if is_needed else None for is_needed in needed]
        return None, None, *adjoint, *all_derivatives


def _apply(function: type[torch.autograd.Function], *arguments: object) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if a._is_zerotensor():  # autograd's zero, for example the slope of abs(y), has no memory
        return True
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _joined(solutions: Sequence[LinearSolution]) -> LinearSolution:
    """Join the solutions of several blocks, without their values."""
    return replace(
        max(solutions, key=lambda solution: len(solution.method)),
        status=concatenated(solutions, "status"),
        residual=concatenated(solutions, "residual"),
        iterations=concatenated(solutions, "iterations"),
        evaluations=max(solution.evaluations for solution in solutions),
    )


def _unpack(recipe: StepRecipe, flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pieces = state_tensors(recipe.packing.unpack(flat))
    return tuple(piece.to(tensor.dtype) for piece, tensor in zip(pieces, like, strict=True))
