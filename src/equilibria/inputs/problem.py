"""The problem of input optimization: z = T(z; x), its adjoint, and the gradient in x."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import InitVar, dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equilibria.context import Context, State
from equilibria.context.state import Packing, map_state, state_tensors
from equilibria.context.twin import twin
from equilibria.equilibrium import EquilibriumLayer, Solving, capabilities
from equilibria.equilibrium.formats import in_fastest_format
from equilibria.equilibrium.layer import Inputs, as_inputs
from equilibria.equilibrium.starts import finite_start
from equilibria.gradients import Symmetry
from equilibria.gradients.capabilities import symmetry_weight
from equilibria.inputs.constraints import Region
from equilibria.inputs.groups import Groups
from equilibria.models.non_finite import accept_non_finite
from equilibria.solvers import SAM, Solution, Status, conjugate_gradients, gmres
from equilibria.solvers.linear.base import LinearSolution

Loss = Callable[[Tensor], Tensor]
"""From the model's outputs to one number per sample."""
Penalty = Callable[[Tensor], Tensor]
"""From the inputs to one number per input."""

SMALL_RESIDUAL = 1e-2
"""Relative residual of z above which the loss at z does not approximate that at the equilibrium."""
CG_ITERATIONS_FACTOR = 10
"""Limit of the iterations of conjugate gradients, as a multiple of that of GMRES before."""


@dataclass(frozen=True)
class JointEvaluation:
    """One evaluation of the map T with one pull-back: all three rows of JIIO's Eq. 11.

    Step sizes are not applied. In the following, z is the state, μ the adjoint, x the input and ℓ
    the loss of an iterate, and J = ∂T/∂z.

    Attributes:
        image: T(z; x), one row per sample.
        adjoint: Jᵀμ + ∂ℓ/∂z, one row per sample.
        gradient: ∂/∂x of ℓ + μᵀT, one row per problem.
        loss: ℓ of each problem at this z, converged or not.
        state_residual: ‖T(z; x) − z‖/‖T(z; x)‖ of each problem.
        adjoint_residual: The same for μ.
        finite: Whether all these values of a problem are finite.
    """

    image: Tensor
    adjoint: Tensor
    gradient: Tensor
    loss: Tensor
    state_residual: Tensor
    adjoint_residual: Tensor
    finite: Tensor

    def where(self, rows: Tensor, other: JointEvaluation, groups: Groups) -> JointEvaluation:
        """Return these values in the problems `rows`, and those of `other` elsewhere."""
        samples = groups.to_samples(rows)

        def selected(name: str) -> Tensor:
            values: Tensor = getattr(self, name)
            mask = samples if name in ("image", "adjoint") else rows
            mask = mask.reshape(-1, *(1,) * (values.dim() - 1))
            return torch.where(mask, values, getattr(other, name))

        return JointEvaluation(**{f.name: selected(f.name) for f in fields(JointEvaluation)})


@dataclass(frozen=True)
class Check:
    """Equilibria at given inputs, with their true losses.

    Attributes:
        x: Inputs, one row per problem.
        z: Equilibria, one row per sample.
        loss: Loss of each problem; NaN if the solve failed (see `SMALL_RESIDUAL`).
        residual: Relative residual of the solve of each problem; infinite if it diverged.
    """

    x: Tensor
    z: Tensor
    loss: Tensor
    residual: Tensor

    def where(self, rows: Tensor, other: Check, groups: Groups) -> Check:
        """Return these equilibria in the problems `rows`, and those of `other` elsewhere."""
        return Check(
            torch.where(rows[:, None], self.x, other.x),
            torch.where(groups.to_samples(rows)[:, None], self.z, other.z),
            torch.where(rows, self.loss, other.loss),
            torch.where(rows, self.residual, other.residual),
        )


@dataclass(eq=False)
class InputProblem:
    """Optimization problems: minimize Σ ℓ(head(z*), x) over x subject to z* = T(z*; x).

    A search stores states z and adjoints μ packed, one row per sample, and inputs x flat, one row
    per problem; the samples of a group share their x. `inject` and `losses` take x and the state in
    the original shapes. The stem may return several tensors, the inputs of the cell. The model is
    constant.
    """

    model: InitVar[nn.Module]
    loss: Loss
    x0: InitVar[Tensor]
    region: Region
    groups: Groups
    penalty: Penalty | None
    evaluations: int = 0
    """Calls of the map T in the search so far, each for the whole batch."""
    vjps: int = 0
    """Vector-Jacobian products with the map T so far."""
    check_evaluations: int = 0
    """Calls of the map T for true losses."""

    def __post_init__(self, model: nn.Module, x0: Tensor) -> None:
        model = as_constant(model)
        self.stem, self.layer, self.head = _parts(model)
        _check_independence(model, self.layer)
        self.input_shape = x0.shape
        context = _checked_context(model, lambda: self.inject(x0))
        start = self.layer.cell.initial_state(*self.cell_inputs(x0), context)
        self.zero_state = map_state(lambda t: t.detach(), start)
        self.packing = Packing.of(self.zero_state)
        self.dtype = state_tensors(self.zero_state)[0].dtype
        cell = self.layer.cell
        limit = cell.limits.contraction
        has_objective = capabilities.potential(cell) is not None
        self.may_expand = has_objective and not (limit is not None and limit < 1)
        """Whether sweeps may diverge although the layer's solver can compute the equilibrium."""

    def on(self, model: nn.Module) -> InputProblem:
        """Return the same problem for another copy of its model."""
        other = copy(self)
        other.stem, other.layer, other.head = _parts(model)
        return other

    def cell_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the stem for the inputs x, one row per sample."""
        injected = as_inputs(self.stem(self.groups.to_samples(x)))
        return tuple(in_fastest_format(tensor) for tensor in injected)

    def inject(self, x: Tensor) -> Context:
        """Return the tensors that every step of the equilibrium layer reads besides the state.

        Args:
            x: Inputs of the model, one row per optimization problem. The result is in their graph.
        """
        return self.layer.cell.inject(*self.cell_inputs(x))

    def losses(self, state: State, context: Context, x: Tensor) -> Tensor:
        """Return the loss of each problem at a state, converged or not."""
        outputs = self.head(self.layer.cell.output(state, context))
        values = _checked_losses(self.loss(outputs), outputs, self.groups.samples, "loss")
        total = self.groups.sum(values)
        if self.penalty is not None:
            extra = self.penalty(x)
            total = total + _checked_losses(extra, x, self.groups.problems, "penalty")
        return total

    @torch.no_grad()
    def check(
        self, x: Tensor, start: Tensor | None, *, tolerance: float, reset: Tensor | None = None
    ) -> Check:
        """Solve for the equilibria at the inputs x and evaluate their losses.

        Args:
            x: Inputs, one row per problem.
            start: States to start from, one row per sample; None uses the layer's initial state.
            tolerance: Relative residual of the solve.
            reset: Mask of problems that start at the layer's initial state instead of `start`.

        Returns:
            The equilibria with their losses and residuals.
        """
        shaped = x.reshape(self.input_shape)
        context = self.inject(shaped)
        if start is not None and reset is not None and bool(reset.any()):
            initial = self.packing.pack(self._initial_state(context))
            start = torch.where(self.groups.to_samples(reset)[:, None], initial, start)
        solution = self.solve(
            context, start, tolerance=tolerance, max_iterations=self.generous_limit
        )
        self.check_evaluations += solution.evaluations
        losses = self.losses(solution.state, context, shaped)
        failed = (solution.status == int(Status.DIVERGED)) | ~torch.isfinite(solution.residual)
        residual = self.groups.largest(torch.where(failed, torch.inf, solution.residual))
        loss = torch.where(residual <= SMALL_RESIDUAL, losses, torch.nan)
        return Check(x, self.packing.pack(solution.state), loss, residual)

    @property
    def generous_limit(self) -> int:
        """Limit of the iterations of solves that should not stop early."""
        return max(self.layer.solver.max_iterations, 500)

    @torch.no_grad()
    def solve(
        self,
        context: Context,
        start: Tensor | None,
        *,
        tolerance: float,
        max_iterations: int | None = None,
        rows: Tensor | None = None,
    ) -> Solution:
        """Compute the equilibrium for an input by the layer's solver.

        Args:
            context: Result of `inject` for the input.
            start: States to start from, one row per sample; None uses the layer's initial state.
            tolerance: Relative residual of the solve.
            max_iterations: Limit of the iterations; None uses that of the layer's solver.
            rows: Indices of the samples to solve; None solves all.

        Returns:
            The solution of these samples.
        """
        limit = max_iterations or self.layer.solver.max_iterations
        solver = replace(self.layer.solver, tolerance=tolerance, max_iterations=limit)
        if start is None:
            state = self._initial_state(context)
        else:
            state = self.packing.unpack(start.clone())
        if rows is not None:
            context, state = context.keep(rows), map_state(lambda t: t[rows], state)
        return solver.solve(self.layer.problem_at(context, state))

    def _initial_state(self, context: Context) -> State:
        """Return T(0) if that is finite and known without an evaluation, otherwise zero."""
        first = capabilities.first_image(self.layer.cell, context)
        if first is None:
            return map_state(torch.clone, self.zero_state)
        return finite_start(first, context)

    def leaves(self, z: Tensor) -> State:
        """Return the state of the rows `z` as leaves of a new graph."""
        return map_state(lambda t: t.detach().requires_grad_(), self.packing.unpack(z))


class FixedInput:
    """Optimization problems at a fixed input x, for any number of updates of z and μ.

    `inject` runs once. z is the equilibrium and μ its adjoint.

    Args:
        problem: The problems.
        x: Inputs, flat, one row per problem.
        scale: Factor of the loss of each problem. None sets it to 1/‖∂ℓ/∂z‖ at the first
            linearization, which makes μ of the order of 1 for any unit of the loss.
    """

    def __init__(self, problem: InputProblem, x: Tensor, scale: Tensor | None) -> None:
        self.problem = problem
        self.scale = scale
        with torch.enable_grad():
            self.rows = x.detach().requires_grad_()
            self.x = self.rows.reshape(problem.input_shape)
            self.context = problem.inject(self.x)

    @torch.no_grad()
    def image(self, z: Tensor) -> Tensor:
        """Return T(z; x), one step of the map at the states z, without a graph."""
        self.problem.evaluations += 1
        cell, packing = self.problem.layer.cell, self.problem.packing
        return packing.pack(cell.step(packing.unpack(z), self.context))


class JointLinearization:
    """Map T and loss at one state z and input x, evaluated once for any number of pull-backs.

    Args:
        fixed: The problems at x.
        z: States, one row per sample.
        loss_at_image: Evaluate the loss and its slope at T(z; x), which is nearer to the
            equilibrium than z.
    """

    def __init__(self, fixed: FixedInput, z: Tensor, *, loss_at_image: bool = False) -> None:
        self.problem = problem = fixed.problem
        self.z, self.x, self.context = z, fixed.rows, fixed.context
        problem.evaluations += 1
        with torch.enable_grad():
            state = problem.leaves(z)
            self.states = state_tensors(state)
            image = problem.layer.cell.step(state, fixed.context)
            self.images = state_tensors(image)
            if loss_at_image:
                state = map_state(lambda t: t.detach().requires_grad_(), image)
            losses = problem.losses(state, fixed.context, fixed.x)
            total = losses.sum() if fixed.scale is None else (losses * fixed.scale).sum()
        *slope, self.direct = torch.autograd.grad(
            total, (*state_tensors(state), self.x), retain_graph=True, materialize_grads=True
        )
        self.slope = problem.packing.pack(tuple(slope))
        """∂ℓ/∂z, one row per sample."""
        if fixed.scale is None:
            fixed.scale = _unit_scale(problem.groups.norm(self.slope))
            # Not in place, because the slope of a mean is an expanded tensor.
            self.slope = self.slope * problem.groups.to_samples(fixed.scale)[:, None]
            self.direct *= fixed.scale[:, None]
        self.image = problem.packing.pack(self.images).detach()
        self.loss = losses.detach()

    def pull(self, mu: Tensor) -> Tensor:
        """Return the updated adjoint Jᵀμ + ∂ℓ/∂z, with J = ∂T/∂z and the loss ℓ; keep the graph."""
        return self._pulled(mu, self.states, keep=True)[0] + self.slope

    def evaluation(self, mu: Tensor) -> JointEvaluation:
        """Return the evaluation at the adjoint μ, with the gradient in x; this frees the graph."""
        pulled, gradient = self._pulled(mu, (*self.states, self.x), keep=False)
        assert gradient is not None
        adjoint, gradient = pulled + self.slope, gradient + self.direct
        groups = self.problem.groups
        # A sum is finite only if all terms are. If it overflows, the search has diverged anyway.
        states = groups.largest(self.image.abs().sum(dim=1) + adjoint.abs().sum(dim=1))
        return JointEvaluation(
            image=self.image,
            adjoint=adjoint,
            gradient=gradient,
            loss=self.loss,
            state_residual=groups.relative_residual(self.z, self.image),
            adjoint_residual=groups.relative_residual(mu, adjoint),
            finite=torch.isfinite(states + gradient.abs().sum(dim=1) + self.loss),
        )

    def solve_adjoint(
        self,
        start: Tensor | None,
        *,
        tolerance: float,
        max_iterations: int = 200,
        rows: Tensor | None = None,
    ) -> LinearSolution:
        """Solve for the adjoint μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z by GMRES, with J = ∂T/∂z and the loss ℓ.

        If GMRES does not converge, conjugate gradients continue, provided that the cell declares a
        symmetry and does not prove that its map contracts.

        Args:
            start: μ to start from, one row per sample; None starts at zero.
            tolerance: Relative residual of the solve.
            max_iterations: Limit of the products with Jᵀ.
            rows: Mask of the samples to solve; the result is zero elsewhere. None solves all.

        Returns:
            The solution, one row per sample.
        """
        slope = self.slope
        if rows is not None:
            slope = torch.where(rows[:, None], slope, 0.0)
            start = None if start is None else torch.where(rows[:, None], start, 0.0)

        def operator(vector: Tensor) -> Tensor:
            return vector - self._pulled(vector, self.states, keep=True)[0]

        solution = gmres(
            operator, slope, start=start, tolerance=tolerance, max_iterations=max_iterations
        )
        cell = self.problem.layer.cell
        has_fallback = self.problem.may_expand and cell.symmetry is not Symmetry.NONE
        if not has_fallback or bool(solution.converged.all()):
            return solution
        weight = None
        if cell.symmetry is Symmetry.WEIGHTED:
            state = self.problem.packing.unpack(self.z)
            weight = self.problem.packing.pack(symmetry_weight(cell, state, self.context)).detach()
        return conjugate_gradients(
            operator,
            slope,
            weight,
            start=solution.value,
            tolerance=tolerance,
            max_iterations=CG_ITERATIONS_FACTOR * max_iterations,
        )

    def _pulled(
        self, mu: Tensor, inputs: tuple[Tensor, ...], *, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return Jᵀμ, and the pull-back to x if `inputs` holds x after the states."""
        self.problem.vjps += 1
        packing = self.problem.packing
        gradients = torch.autograd.grad(
            self.images,
            inputs,
            state_tensors(packing.unpack(mu)),
            retain_graph=keep,
            materialize_grads=True,
        )
        count = len(self.states)
        return packing.pack(gradients[:count]), gradients[count] if len(gradients) > count else None


def _unit_scale(size: Tensor) -> Tensor:
    """Return 1/size, or 1 where that is not finite."""
    usable = (size > 0) & torch.isfinite(size)
    return torch.where(usable, 1 / torch.where(usable, size, 1.0), 1.0)


def as_constant(model: nn.Module, *, evaluating: bool = False) -> nn.Module:
    """Return a copy without gradients, whose layers solve with the current settings of `model`.

    The copy is private to the search. The model keeps its modes, gradients and caches; other
    threads may train it meanwhile; and `solving` blocks around the search, such as those of a
    training with a Jacobian penalty or warm starts, do not record its solves.

    Args:
        model: The model; a compiled model is unwrapped.
        evaluating: Put the copy in evaluation mode, except layers of a model in training, which do
            not warn when they reach the limit of iterations.
    """
    model = getattr(model, "_orig_mod", model)  # the module inside `torch.compile`
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        # The tensors of a script module cannot be replaced. It has no equilibrium layer.
        scripted = deepcopy(model)
        return scripted.eval() if evaluating else scripted
    result = twin(model, lambda tensor: tensor.detach().clone())
    accept_non_finite(result)
    for original, copied in zip(model.modules(), result.modules(), strict=True):
        is_layer = isinstance(original, EquilibriumLayer)
        copied.training = original.training and (is_layer or not evaluating)
        if isinstance(original, EquilibriumLayer) and isinstance(copied, EquilibriumLayer):
            copied.identity = object()
            copied.solving = Solving(
                solver=original.solver, gradient=original.gradient, strict=original.strict
            )
    return result


def _parts(
    model: nn.Module,
) -> tuple[Callable[[Tensor], Inputs], EquilibriumLayer, Callable[[Tensor], Tensor]]:
    stem, layer, head = (getattr(model, name, None) for name in ("stem", "layer", "head"))
    if not (callable(stem) and callable(head) and isinstance(layer, EquilibriumLayer)):
        raise TypeError(
            f"{type(model).__name__} must have the attributes stem, layer (an EquilibriumLayer) "
            "and head, as an EquilibriumClassifier does; use nn.Identity() for a missing part"
        )
    return stem, layer, head


def _check_independence(model: nn.Module, layer: EquilibriumLayer) -> None:
    """Raise `ValueError` if samples depend on each other or on the number of iterations."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name} is a BatchNorm that uses statistics of the batch, so the samples depend "
                "on each other: call model.eval() first, or use group norms"
            )
    if layer.couples_batch:
        raise ValueError(
            f"{type(layer.cell).__name__} or its solver couples the samples of a batch, so their "
            "inputs cannot be optimized independently: call model.eval() if they are coupled only "
            "in training, or choose terms, norms and a solver without coupling"
        )
    if isinstance(layer.solver, SAM):
        raise ValueError(
            "the layer's solver is SAM, whose result depends on its number of steps, not only on "
            "the input: call this inside `with eq.solving(model, solver='auto'):`"
        )
    if capabilities.refresh_until(layer.cell):
        raise ValueError(
            f"{type(layer.cell).__name__} changes its context during a solve (frozen signs, "
            "perturbations), so its map is not a function of the input alone: use sign='smooth' "
            "and pe='off', or call model.eval() if the context changes only in training"
        )


def _checked_context(model: nn.Module, inject: Callable[[], Context]) -> Context:
    """Return the context; raise `ValueError` if the stem is random or updates its buffers."""
    # Buffers that are initialized by the first input do not count as a change.
    with torch.no_grad():
        context = inject()
    initial_buffers = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        # Other buffers change only if gradients are enabled, as they are in the search.
        with torch.enable_grad():
            previous, context = context, inject()
        is_repeatable = all(map(_equal, context.tensors(), previous.tensors()))
        if is_repeatable:
            break
    has_changed = not all(map(_equal, model.buffers(), initial_buffers))
    if has_changed or not is_repeatable:
        raise ValueError(
            "the model returns different outputs for the same input: it draws random numbers or "
            "updates running statistics; call model.eval() first"
        )
    return context


def _equal(tensor: Tensor, other: Tensor) -> bool:
    with torch.no_grad():
        return tensor.shape == other.shape and torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _checked_losses(values: object, given: Tensor, count: int, name: str) -> Tensor:
    """Return the values of a loss; raise `ValueError` unless there is one per row of `given`."""
    if not isinstance(values, Tensor) or values.shape != (count,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"{name} must return one number per row, a tensor of shape ({count},), got {got}; use "
            "reduction='none' and sum over the other dimensions"
        )
    if torch.is_grad_enabled() and given.requires_grad and not values.requires_grad:
        raise ValueError(
            f"the result of {name} is not differentiable in its argument; compute it with torch "
            "operations, without detach() or item()"
        )
    return values
