"""Input optimization as one problem: z = T(z; x), its adjoint, and the gradient in x."""

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
"""From the model's outputs to one number a sample."""
Penalty = Callable[[Tensor], Tensor]
"""From the inputs to one number an input."""

SMALL_RESIDUAL = 1e-2
"""Relative residual of z above which the loss at z says nothing of the loss at the equilibrium."""
LONGER = 10
"""Limit of the products of conjugate gradients, as a multiple of that of GMRES before them."""


@dataclass(frozen=True)
class JointEvaluation:
    """One evaluation of T with one pull-back: all three rows of Eq. 11, without step sizes."""

    image: Tensor
    """T(z; x), one row a sample."""
    adjoint: Tensor
    """Jᵀμ + ∂ℓ/∂z, one row a sample."""
    gradient: Tensor
    """∂/∂x of ℓ + μᵀT, one row a problem."""
    loss: Tensor
    """ℓ of each problem at this z, converged or not."""
    state_residual: Tensor
    """‖T(z; x) − z‖/‖T(z; x)‖ of each problem."""
    adjoint_residual: Tensor
    """The same of μ."""
    finite: Tensor
    """Whether all of this is finite, for each problem."""

    def where(self, rows: Tensor, other: JointEvaluation, groups: Groups) -> JointEvaluation:
        """Take these values in the problems `rows`, and those of `other` elsewhere."""
        of_samples = groups.to_samples(rows)

        def chosen(name: str) -> Tensor:
            own: Tensor = getattr(self, name)
            mask = of_samples if name in ("image", "adjoint") else rows
            return torch.where(mask.reshape(-1, *(1,) * (own.dim() - 1)), own, getattr(other, name))

        return JointEvaluation(**{f.name: chosen(f.name) for f in fields(JointEvaluation)})


@dataclass(frozen=True)
class Check:
    """Equilibria that were solved for, with their losses; one row or entry per problem."""

    x: Tensor
    z: Tensor
    """The equilibria, one row per sample."""
    loss: Tensor
    """NaN where the solve failed (see `SMALL_RESIDUAL`)."""
    residual: Tensor
    """Relative residual of the solve; infinite where it diverged."""

    def where(self, rows: Tensor, other: Check, groups: Groups) -> Check:
        """Take these equilibria in the problems `rows`, and those of `other` elsewhere."""
        return Check(
            torch.where(rows[:, None], self.x, other.x),
            torch.where(groups.to_samples(rows)[:, None], self.z, other.z),
            torch.where(rows, self.loss, other.loss),
            torch.where(rows, self.residual, other.residual),
        )


@dataclass(eq=False)
class InputProblem:
    """minimize Σ ℓ(head(z*), x) over x for each problem, z* = T(z*; x), the model a constant.

    A search keeps z and μ packed, one row a sample, and x flat, one row a problem: the samples of a
    group share their x. `inject` and `losses` take x and the state in their own shapes. The stem
    may return several tensors, the inputs of the cell.
    """

    model: InitVar[nn.Module]
    loss: Loss
    x0: InitVar[Tensor]
    region: Region
    groups: Groups
    penalty: Penalty | None
    evaluations: int = 0
    """Calls of T in a search so far, each for the whole batch; and pull-backs through it."""
    vjps: int = 0
    check_evaluations: int = 0
    """Calls of T for true losses."""

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
        """Whether plain steps may diverge although the layer's solver can find the equilibrium."""

    def on(self, model: nn.Module) -> InputProblem:
        """The same problem for another twin of its model."""
        other = copy(self)
        other.stem, other.layer, other.head = _parts(model)
        return other

    def cell_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the stem makes of x for each sample."""
        injected = as_inputs(self.stem(self.groups.to_samples(x)))
        return tuple(in_fastest_format(one) for one in injected)

    def inject(self, x: Tensor) -> Context:
        """The context of the inputs x, in the graph of x and the parameters."""
        return self.layer.cell.inject(*self.cell_inputs(x))

    def losses(self, state: State, context: Context, x: Tensor) -> Tensor:
        """ℓ of each problem at a state, converged or not."""
        outputs = self.head(self.layer.cell.output(state, context))
        values = _checked_losses(self.loss(outputs), outputs, self.groups.samples, "loss")
        total = self.groups.sum(values)
        if self.penalty is not None:
            extra = self.penalty(x)
            total = total + _checked_losses(extra, x, self.groups.problems, "penalty")
        return total

    @torch.no_grad()
    def check(
        self, x: Tensor, start: Tensor | None, *, tolerance: float, afresh: Tensor | None = None
    ) -> Check:
        """Solve for the equilibria at x and evaluate their losses.

        Args:
            x: Inputs, one row per problem.
            start: States to start from, one row per sample; None starts where the layer does.
            tolerance: Relative residual to solve to.
            afresh: Problems that start where the layer does, whatever `start` holds.

        Returns:
            The equilibria with their losses and residuals.
        """
        shaped = x.reshape(self.input_shape)
        context = self.inject(shaped)
        if start is not None and afresh is not None and bool(afresh.any()):
            usual = self.packing.pack(self._zero_start(context))
            start = torch.where(self.groups.to_samples(afresh)[:, None], usual, start)
        found = self.solve(context, start, tolerance=tolerance, max_iterations=self.longest_solve)
        self.check_evaluations += found.evaluations
        losses = self.losses(found.state, context, shaped)
        failed = (found.status == int(Status.DIVERGED)) | ~torch.isfinite(found.residual)
        residual = self.groups.largest(torch.where(failed, torch.inf, found.residual))
        loss = torch.where(residual <= SMALL_RESIDUAL, losses, torch.nan)
        return Check(x, self.packing.pack(found.state), loss, residual)

    @property
    def longest_solve(self) -> int:
        """Limit of the iterations of solves that must not fail for lack of them."""
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
        """Find the equilibrium of a context by the layer's own solver.

        Args:
            context: Result of `inject`.
            start: States to start from, one row per sample; None starts where the layer does.
            tolerance: Relative residual to solve to.
            max_iterations: Limit of the iterations; None takes that of the layer's solver.
            rows: Indices of the samples to solve; None solves all.

        Returns:
            The solution of these samples.
        """
        allowed = max_iterations or self.layer.solver.max_iterations
        solver = replace(self.layer.solver, tolerance=tolerance, max_iterations=allowed)
        first = self._zero_start(context) if start is None else self.packing.unpack(start.clone())
        if rows is not None:
            context, first = context.keep(rows), map_state(lambda t: t[rows], first)
        return solver.solve(self.layer.problem_at(context, first))

    def _zero_start(self, context: Context) -> State:
        """Where a layer starts: at T(0) where that costs nothing and is finite, or at zero."""
        first = capabilities.first_image(self.layer.cell, context)
        if first is None:
            return map_state(torch.clone, self.zero_state)
        return finite_start(first, context)

    def leaves(self, z: Tensor) -> State:
        """The state of the rows `z`, to differentiate in."""
        return map_state(lambda t: t.detach().requires_grad_(), self.packing.unpack(z))


class FixedInput:
    """The problem at one x: `inject` runs once, however often z and μ are swept.

    scale: what the loss is multiplied by, for each problem; None: 1/‖∂ℓ/∂z‖ where it is linearized
        first, which makes μ of the order of 1 whatever the loss's unit.
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
        """T(z; x) alone."""
        self.problem.evaluations += 1
        cell, packing = self.problem.layer.cell, self.problem.packing
        return packing.pack(cell.step(packing.unpack(z), self.context))


class JointLinearization:
    """T and the loss at one (z, x): any number of pull-backs share the evaluation.

    fresh: the loss and its slope are those at T(z; x), which is nearer to the equilibrium.
    """

    def __init__(self, here: FixedInput, z: Tensor, *, fresh: bool = False) -> None:
        self.problem = problem = here.problem
        self.z, self.x, self.context = z, here.rows, here.context
        problem.evaluations += 1
        with torch.enable_grad():
            state = problem.leaves(z)
            self.states = state_tensors(state)
            image = problem.layer.cell.step(state, here.context)
            self.images = state_tensors(image)
            if fresh:
                state = map_state(lambda t: t.detach().requires_grad_(), image)
            losses = problem.losses(state, here.context, here.x)
            total = losses.sum() if here.scale is None else (losses * here.scale).sum()
        *slope, self.direct = torch.autograd.grad(
            total, (*state_tensors(state), self.x), retain_graph=True, materialize_grads=True
        )
        self.slope = problem.packing.pack(tuple(slope))
        """∂ℓ/∂z, one row a sample."""
        if here.scale is None:
            here.scale = _unit_scale(problem.groups.norm(self.slope))
            # Not in place: a loss that is a mean has a slope whose numbers share their memory.
            self.slope = self.slope * problem.groups.to_samples(here.scale)[:, None]
            self.direct *= here.scale[:, None]
        self.image = problem.packing.pack(self.images).detach()
        self.loss = losses.detach()

    def pull(self, mu: Tensor) -> Tensor:
        """Jᵀμ + ∂ℓ/∂z; the evaluation can be pulled through again."""
        return self._pulled(mu, self.states, keep=True)[0] + self.slope

    def evaluation(self, mu: Tensor) -> JointEvaluation:
        """The last pull-back: the gradient in x as well."""
        pulled, gradient = self._pulled(mu, (*self.states, self.x), keep=False)
        assert gradient is not None
        adjoint, gradient = pulled + self.slope, gradient + self.direct
        groups = self.problem.groups
        # A sum of numbers is one only if all are; it may also overflow, which is as bad.
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
        """Solve for μ = (I − Jᵀ)⁻¹ ∂ℓ/∂z by GMRES.

        Conjugate gradients continue where GMRES does not converge, if the cell states a symmetry
        and does not prove that its map contracts.

        Args:
            start: μ to start from, one row per sample; None starts at zero.
            tolerance: Relative residual to solve to.
            max_iterations: Limit of the products with Jᵀ.
            rows: Samples to solve, as a mask; the result is zero elsewhere. None solves all.

        Returns:
            The solution, one row per sample.
        """
        slope = self.slope
        if rows is not None:
            slope = torch.where(rows[:, None], slope, 0.0)
            start = None if start is None else torch.where(rows[:, None], start, 0.0)

        def operator(vector: Tensor) -> Tensor:
            return vector - self._pulled(vector, self.states, keep=True)[0]

        found = gmres(
            operator, slope, start=start, tolerance=tolerance, max_iterations=max_iterations
        )
        cell = self.problem.layer.cell
        unknown = not self.problem.may_expand or cell.symmetry is Symmetry.NONE
        if unknown or bool(found.converged.all()):
            return found
        weight = None
        if cell.symmetry is Symmetry.WEIGHTED:
            state = self.problem.packing.unpack(self.z)
            weight = self.problem.packing.pack(symmetry_weight(cell, state, self.context)).detach()
        return conjugate_gradients(
            operator,
            slope,
            weight,
            start=found.value,
            tolerance=tolerance,
            max_iterations=LONGER * max_iterations,
        )

    def _pulled(
        self, mu: Tensor, wanted: tuple[Tensor, ...], *, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.problem.vjps += 1
        packing = self.problem.packing
        found = torch.autograd.grad(
            self.images,
            wanted,
            state_tensors(packing.unpack(mu)),
            retain_graph=keep,
            materialize_grads=True,
        )
        count = len(self.states)
        return packing.pack(found[:count]), found[count] if len(found) > count else None


def _unit_scale(size: Tensor) -> Tensor:
    """1/size, or 1 where that is no number."""
    usable = (size > 0) & torch.isfinite(size)
    return torch.where(usable, 1 / torch.where(usable, size, 1.0), 1.0)


def as_constant(model: nn.Module, *, evaluating: bool = False) -> nn.Module:
    """A twin whose tensors need no gradient, and whose layers solve as those of `model` do now.

    The search has it for itself: the model keeps its modes, gradients and memories, other threads
    may train it meanwhile, and blocks around the search (those of a training, with a Jacobian
    penalty or warm starts) do not hear of what is solved. No graph is kept for parameters, and
    controlled norms are remembered.

    evaluating: in evaluation mode, but for layers of a model in training, which do not warn where
        they run out of iterations.
    """
    model = getattr(model, "_orig_mod", model)  # What `torch.compile` has compiled.
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        # Its tensors are out of reach; it holds no equilibrium, and is copied whole.
        whole = deepcopy(model)
        return whole.eval() if evaluating else whole
    own = twin(model, lambda tensor: tensor.detach().clone())
    accept_non_finite(own)
    for original, beside in zip(model.modules(), own.modules(), strict=True):
        is_layer = isinstance(original, EquilibriumLayer)
        beside.training = original.training and (is_layer or not evaluating)
        if isinstance(original, EquilibriumLayer) and isinstance(beside, EquilibriumLayer):
            beside.identity = object()
            beside.solving = Solving(
                solver=original.solver, gradient=original.gradient, strict=original.strict
            )
    return own


def _parts(
    model: nn.Module,
) -> tuple[Callable[[Tensor], Inputs], EquilibriumLayer, Callable[[Tensor], Tensor]]:
    stem, layer, head = (getattr(model, name, None) for name in ("stem", "layer", "head"))
    if not (callable(stem) and callable(head) and isinstance(layer, EquilibriumLayer)):
        raise TypeError(
            f"{type(model).__name__} needs a stem, a layer (an EquilibriumLayer) and a head, as "
            "every EquilibriumClassifier has; use nn.Identity() for a part that does nothing"
        )
    return stem, layer, head


def _check_independence(model: nn.Module, layer: EquilibriumLayer) -> None:
    """Refuse a model whose samples depend on each other, or on how long they are solved."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name} is a BatchNorm that uses the statistics of its batch, which makes the "
                "input of one sample depend on the others: call model.eval() first, or use group "
                "norms"
            )
    if layer.couples_batch:
        raise ValueError(
            f"{type(layer.cell).__name__} or its solver couples the samples of a batch, so their "
            "inputs cannot be optimized one by one: call model.eval() if that is only so in "
            "training, or choose terms, norms and a solver without coupling"
        )
    if isinstance(layer.solver, SAM):
        raise ValueError(
            "the layer's solver is SAM, whose result depends on its number of steps and not on the "
            "input alone: search inside `with eq.solving(model, solver='auto'):`"
        )
    if capabilities.refresh_until(layer.cell):
        raise ValueError(
            f"{type(layer.cell).__name__} renews its context during a solve (frozen signs, "
            "perturbations), so its map is no function of the input alone: use sign='smooth' and "
            "pe='off', or call model.eval() if it does so only in training"
        )


def _checked_context(model: nn.Module, inject: Callable[[], Context]) -> Context:
    """Refuse a model that draws at random or learns as it goes: every x-step would change it."""
    # A statistic that has seen nothing takes the first input that comes: that is no change.
    with torch.no_grad():
        context = inject()
    before = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        # Others are learned where gradients are wanted, as in the search.
        with torch.enable_grad():
            earlier, context = context, inject()
        repeats = all(map(_same, context.tensors(), earlier.tensors()))
        if repeats:
            break
    changed = not all(map(_same, model.buffers(), before))
    if changed or not repeats:
        raise ValueError(
            "the model gives two answers to one input: it draws at random, or learns running "
            "statistics as it goes; call model.eval() first"
        )
    return context


def _same(one: Tensor, other: Tensor) -> bool:
    with torch.no_grad():
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _checked_losses(values: object, given: Tensor, count: int, name: str) -> Tensor:
    """One number a sample, or an error that says what came instead; `given` made the values."""
    if not isinstance(values, Tensor) or values.shape != (count,):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"{name} must return one number for each of the {count} rows it is given, a tensor of "
            f"shape ({count},), not {got}; use reduction='none' and sum over what is left"
        )
    if torch.is_grad_enabled() and given.requires_grad and not values.requires_grad:
        raise ValueError(
            f"{name} does not depend on what it is given in a way that can be differentiated"
        )
    return values
