"""Attribution of a classifier's decision to the terms of its hidden objective.

Give every term a weight, E = Σ_t s_t E_t, and differentiate the margin m = w_k − w_j of two classes
at the equilibrium y = σ(Σ_t s_t d_t(y)), d_t = −∇E_t, with respect to s at s = 1. The adjoint u of
the equilibrium solves (I − Jᵀ)u = ∂m/∂y. The derivative of m with respect to a force on each unit
is v = σ′u, which gives

    pull:    ∂m/∂s_t = ⟨v, d_t(y*)⟩                 exact, by the implicit function theorem
    source:  ⟨v, d_t(y*) − (∂d_t/∂y) y*⟩             the part of the pull that is independent of y*

ReLU, leaky ReLU and the identity satisfy σ(a) = σ′(a)·a, so y* = (I − σ′Σ∂d_t)⁻¹ σ′ Σ(d_t −
(∂d_t/∂y)y*). If the logits are also affine in the state, the margin is the sum of the sources and
of the head's biases. A term of degree 1 in y, −⟨Ux + b, y⟩, has source = pull. A term of degree 2,
−½‖Wᵀy‖², has source 0: it only amplifies other terms. In OptEq, POptEqs and MOptEqs without
diversity, the pulls of the linear terms alone therefore sum to the margin (Euler's theorem). The
kernels of GEQ have both parts. The curvature of any other σ leaves a remainder.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.activations import Activation, IdentityActivation, LeakyReLU, ReLU
from equilibria.context import Context, State
from equilibria.context.state import map_state, state_tensors, sum_per_sample
from equilibria.energies import Branches, Energy, HeritageDiversity, Input
from equilibria.energies.compose import Scaled, Sum
from equilibria.equilibrium import Cell, EquilibriumLayer, solving
from equilibria.equilibrium.capabilities import EnergyForm, closed_form, energy_form, output_form
from equilibria.gradients import Implicit, Symmetry
from equilibria.models.affine import why_not_affine
from equilibria.models.base import EquilibriumModel, in_float64
from equilibria.models.opteq.cells import DeepOptEqCell
from equilibria.solvers import Picard, Solution

TOLERANCE = 1e-10
"""Relative tolerance of the equilibrium and of its adjoint, in float64."""
MAX_ITERATIONS = 2000
HOMOGENEOUS = (ReLU, LeakyReLU, IdentityActivation)
"""Activations with σ(a) = σ′(a)·a."""
BYPASS = "input past the equilibrium"
CANCELLATION = 1e-12
"""Differences of float64 numbers below this fraction of their size are rounding errors."""


class NoContributionsError(ValueError):
    """The model's decisions cannot be attributed to terms; the message gives the reason."""


@dataclass(frozen=True)
class Contributions:
    """Contribution of each term of the hidden objective to the margin between two classes.

    All tensors are float64.

    Attributes:
        terms: Names of the terms.
        pull: Derivative of the margin with respect to the weight of each term, shape (B, terms).
        source: Part of the margin that each term supplies, shape (B, terms).
        head: Margin of a feature of zeros, from the biases of the head, shape (B,).
        margin: Logit of the first class minus that of the second, shape (B,).
        why_not_sum: Reason why `head` and `source` may not sum to `margin`; empty if they do.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> zero, three = torch.tensor([0]), torch.tensor([3])
        >>> result = eq.models.contributions(model, images, zero, three)
        >>> result.margin > 0, result.why_not_sum  # in favor of zero; the terms sum to the margin
        (tensor([True]), '')
    """

    terms: tuple[str, ...]
    pull: Tensor
    source: Tensor
    head: Tensor
    margin: Tensor
    why_not_sum: str

    @property
    def remainder(self) -> Tensor:
        """Margin minus head and sources, shape (B,); a rounding error if `why_not_sum` is empty."""
        return self.margin - self.head - self.source.sum(dim=1)


def contributions(
    model: EquilibriumModel, images: Tensor, classes: Tensor, rivals: Tensor
) -> Contributions:
    """Attribute the margin between two classes to the terms of the hidden objective.

    Equilibria and adjoints are solved in float64 to a tolerance of 1e-10.

    Args:
        model: Classifier with a hidden objective.
        images: Images, shape (B, C, H, W).
        classes: Class k of each image, shape (B,).
        rivals: Class j of each image, shape (B,); the margin is logit k − logit j.

    Raises:
        NoContributionsError: If the cell has no hidden objective, or couples the samples.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> zero, three = torch.tensor([0]), torch.tensor([3])
        >>> result = eq.models.contributions(model, images, zero, three)
        >>> result.terms, result.pull.shape
        (('input', 'bias', 'quadratic'), torch.Size([1, 3]))
    """
    exact = in_float64(model)
    if exact.layer.couples_batch:
        raise NoContributionsError(
            "the samples of a batch are coupled, so a decision is not a function of one image"
        )
    # Rows that are orthonormal to a few digits only limit the precision of a closed form.
    solver = None if closed_form(exact.layer.cell) is None else "picard"
    with solving(exact, tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS):
        solution = exact.solve(images.double(), solver=solver)
    attribution = _Attribution(exact, classes, rivals)
    form = energy_form(exact.layer.cell, solution.state, solution.context)
    if form is not None:
        return attribution.to_terms(form)
    if isinstance(exact.layer.cell, DeepOptEqCell):
        return attribution.to_layers(exact.layer.cell, solution)
    raise NoContributionsError(
        f"{type(exact.layer.cell).__name__} has no hidden objective to attribute decisions to"
    )


@dataclass(frozen=True)
class _Attribution:
    """Attribution of margins; the fields are the arguments of `contributions`."""

    model: EquilibriumModel
    classes: Tensor
    rivals: Tensor

    def margin(self, cell: Cell, state: State, context: Context) -> Tensor:
        return self._between(cell.output(state, context))

    def _between(self, feature: Tensor) -> Tensor:
        logits: Tensor = self.model.head(feature)
        pair = (logits.gather(1, index[:, None])[:, 0] for index in (self.classes, self.rivals))
        first, second = pair
        return first - second

    def to_terms(self, form: EnergyForm) -> Contributions:
        cell, context = form.cell, form.context
        force = tuple(
            torch.zeros_like(y, requires_grad=True)
            for y in state_tensors(map_state(torch.detach, form.image))
        )
        # The solve starts at the equilibrium, so only the adjoint takes iterations.
        layer = EquilibriumLayer(
            cell=_ForcedCell(form),
            solver=Picard(tolerance=math.sqrt(TOLERANCE)),
            gradient=Implicit(tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS),
        )
        with torch.enable_grad(), solving(layer, record="equilibria") as record:
            layer(force, form.image)
            state = record.equilibria[0].state
            margin = self.margin(cell, state, context)
            forces = torch.autograd.grad(margin.sum(), force)
        names, pulls, sources = [], [], []
        with torch.enable_grad():
            state = map_state(lambda y: y.detach().requires_grad_(), state)
            for name, descents in _named_descents(cell.energy, state, context):
                names.append(name)
                pull = [sum_per_sample(v * d) for v, d in zip(forces, descents, strict=True)]
                total = torch.stack(pull).sum(dim=0)
                pulls.append(total.detach())
                sources.append(_difference(total, _amplified(total, state)).detach())
            bypass = self._bypass_margin(cell, state, context)
            if bool(bypass.any()):
                names.append(BYPASS)
                pulls.append(bypass)
                sources.append(bypass)
        return Contributions(
            terms=tuple(names),
            pull=torch.stack(pulls, dim=1),
            source=torch.stack(sources, dim=1),
            head=self._head_margin(cell, state, context),
            margin=margin.detach(),
            why_not_sum=self._why_not_sum(cell, [cell.activation]),
        )

    def to_layers(self, cell: DeepOptEqCell, solution: Solution) -> Contributions:
        """Attribute to the inputs and biases of a Deep OptEq's layers.

        The state is homogeneous of degree 1 in all of them together, so pull and source agree.
        """
        leaves = [part["c"].detach().requires_grad_() for part in solution.context.parts.values()]
        pairs = zip(solution.context.parts.items(), leaves, strict=True)
        context = Context(parts={name: part.with_sample(c=c) for (name, part), c in pairs})
        layer = EquilibriumLayer(
            cell=_FixedContextCell(cell, context),
            solver=Picard(tolerance=math.sqrt(TOLERANCE)),
            gradient=Implicit(tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS),
        )
        with torch.enable_grad(), solving(layer, record="equilibria") as record:
            layer(leaves[0], solution.state)
            state = record.equilibria[0].state
            margin = self.margin(cell, state, context)
            gradients = torch.autograd.grad(margin.sum(), leaves)
        names, pulls = [], []
        triples = zip(cell.units(), leaves, gradients, strict=True)
        for number, (unit, c, gradient) in enumerate(triples, 1):
            for name, part in _input_and_bias(unit.input, c.detach()):
                names.append(f"{name} of layer {number}")
                pulls.append(sum_per_sample(gradient * part))
        pull = torch.stack(pulls, dim=1)
        return Contributions(
            terms=tuple(names),
            pull=pull,
            source=pull,
            head=self._head_margin(cell, state, context),
            margin=margin.detach(),
            why_not_sum=self._why_not_sum(cell, [unit.activation for unit in cell.units()]),
        )

    @torch.no_grad()
    def _head_margin(self, cell: Cell, state: State, context: Context) -> Tensor:
        return self._between(torch.zeros_like(cell.output(state, context)))

    @torch.no_grad()
    def _bypass_margin(self, cell: Cell, state: State, context: Context) -> Tensor:
        """Margin of a state of zeros without the head's biases: from −u in a reflection 2z − u."""
        feature = cell.output(map_state(torch.zeros_like, state), context)
        return self._between(feature) - self._between(torch.zeros_like(feature))

    def _why_not_sum(self, cell: Cell, activations: list[Activation]) -> str:
        others = [a for a in activations if not isinstance(a, HOMOGENEOUS)]
        if others:
            return f"σ(a) is not σ′(a)·a for {type(others[0]).__name__}, which leaves a remainder"
        if output_form(cell) == "other":
            return f"the feature of {type(cell).__name__} is not affine in the state"
        return why_not_affine(self.model.head)


class _ForcedCell(Cell):
    """y = σ(−∇E(y) + e): the equilibrium with a force e on every unit."""

    symmetry = Symmetry.WEIGHTED

    def __init__(self, form: EnergyForm) -> None:
        super().__init__()
        self.cell = form.cell
        self.context = form.context

    def inject(self, *force: Tensor) -> Context:
        return Context(sample={"e": force}, parts={"own": self.context})

    def initial_state(self, *force_and_context: Tensor | Context) -> State:
        *force, _ = force_and_context
        zeros = tuple(torch.zeros_like(e) for e in force if isinstance(e, Tensor))
        return zeros if len(zeros) > 1 else zeros[0]

    def output(self, state: State, context: Context) -> Tensor:
        return state_tensors(state)[0]

    def _direction(self, state: State, context: Context) -> State:
        descent = self.cell.energy.descent(state, context.parts["own"])
        several = context.several("e")
        return map_state(torch.add, descent, several if len(several) > 1 else several[0])

    def step(self, state: State, context: Context) -> State:
        return map_state(self.cell.activation, self._direction(state, context))

    def symmetry_weight(self, state: State, context: Context) -> State:
        return map_state(self.cell.activation.derivative, self._direction(state, context))


class _FixedContextCell(Cell):
    """The map of another cell at a fixed context."""

    def __init__(self, cell: Cell, context: Context) -> None:
        super().__init__()
        self.cell = cell
        self.context = context

    def inject(self, *_: Tensor) -> Context:
        return self.context

    def initial_state(self, x: Tensor, context: Context) -> State:
        return self.cell.initial_state(x, context)

    def step(self, state: State, context: Context) -> State:
        return self.cell.step(state, context)


def _amplified(pull: Tensor, state: State) -> Tensor:
    """Return ⟨v, (∂d/∂y)y⟩ per sample for the pull ⟨v, d(y)⟩."""
    if not pull.requires_grad:
        return torch.zeros_like(pull)
    tensors = state_tensors(state)
    slopes = torch.autograd.grad(pull.sum(), tensors, retain_graph=True, materialize_grads=True)
    return torch.stack([sum_per_sample(s * y) for s, y in zip(slopes, tensors, strict=True)]).sum(0)


def _difference(one: Tensor, other: Tensor) -> Tensor:
    difference = one - other
    is_rounding = difference.abs() <= CANCELLATION * (one.abs() + other.abs())
    return torch.where(is_rounding, 0.0, difference)


def _named_descents(
    energy: Energy, state: State, context: Context
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the name and d_t of every elementary term, with one tensor per tensor of the state."""
    tensors = state_tensors(state)
    if isinstance(energy, Sum):
        for name, term in energy.named_terms():
            yield from _named_descents(term, state, context.parts[name])
    elif isinstance(energy, Scaled):
        for name, descents in _named_descents(energy.term, state, context):
            yield name, tuple(energy.factor * descent for descent in descents)
    elif isinstance(energy, Branches):
        for i, (term, part, y) in enumerate(energy.each(context, energy.states(state))):
            zeros = tuple(torch.zeros_like(tensor) for tensor in tensors)
            for name, (descent,) in _named_descents(term, y, part):
                yield f"{name} of branch {i + 1}", (*zeros[:i], descent, *zeros[i + 1 :])
    elif isinstance(energy, Input):
        for name, summand in _input_and_bias(energy, context["c"]):
            yield name, (summand,)
    elif isinstance(energy, HeritageDiversity) and energy.coupling.diversity:
        both = state_tensors(energy.descent(state, context))
        heritage_only = copy.copy(energy)
        heritage_only.coupling = copy.copy(energy.coupling)
        heritage_only.coupling.diversity = 0.0
        heritage = state_tensors(heritage_only.descent(state, context))
        yield "heritage", heritage
        yield "diversity", tuple(a - b for a, b in zip(both, heritage, strict=True))
    else:
        name = "heritage" if isinstance(energy, HeritageDiversity) else energy.name
        yield name.replace("_", " "), state_tensors(energy.descent(state, context))


def _input_and_bias(term: Input, c: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the summands Ux and b of c = Ux + b by name."""
    if term.bias is None:
        yield "input", c
        return
    bias = term.bias.detach().expand_as(c)
    yield "input", c - bias
    yield "bias", bias
