"""Which terms of the hidden objective pulled a decision.

Weigh every term, E = Σ_t s_t E_t, and ask how the margin m = w_k − w_j of two classes at the
equilibrium y = σ(Σ_t s_t d_t(y)), d_t = −∇E_t, depends on s at s = 1. With the adjoint u of the
equilibrium, (I − Jᵀ)u = ∂m/∂y, and v = σ′u, which is how m changes with a small force on each unit,

    pull:    ∂m/∂s_t = ⟨v, d_t(y*)⟩                       exact, by the implicit function theorem
    source:  ⟨v, d_t(y*) − (∂d_t/∂y) y*⟩                   the part of it that needs no feature

For ReLU, leaky or not, and the identity σ(a) = σ′a, hence y* = (I − σ′Σ∂d_t)⁻¹ σ′ Σ(d_t −
(∂d_t/∂y)y*): where the logits are affine in the state the sources add up to the margin, less what
the biases of the head say. A term of degree 1 in y, −⟨Ux + b, y⟩, is all source; one of degree 2,
−½‖Wᵀy‖², is none: it amplifies what others bring. Then, as in OptEq, POptEqs and MOptEqs without
diversity, the pulls of the linear terms alone are the margin (Euler's theorem). Of the kernels of
GEQ each does both. With another σ its curvature leaves a remainder.
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
from equilibria.equilibrium.capabilities import EnergyForm, energy_form, output_form
from equilibria.gradients import Implicit, Symmetry
from equilibria.models.affine import why_not_affine
from equilibria.models.base import EquilibriumModel, in_float64
from equilibria.models.opteq.cells import DeepOptEqCell
from equilibria.solvers import Picard, Solution

TOLERANCE = 1e-10
"""Of the equilibrium and of its adjoint, in float64."""
MOST_ITERATIONS = 2000
HOMOGENEOUS = (ReLU, LeakyReLU, IdentityActivation)
"""Activations with σ(a) = σ′(a)·a."""
PAST = "input past the equilibrium"
CANCELED = 1e-12
"""Of two numbers in float64 that cancel: what is left then is rounding."""


class NoContributionsError(ValueError):
    """The equilibrium is not one of terms that could be weighed; the message says why."""


@dataclass(frozen=True)
class Contributions:
    """What each term does to the margin between two classes; float64, samples first.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> zero, three = torch.tensor([0]), torch.tensor([3])
        >>> found = eq.models.contributions(model, images, zero, three)
        >>> found.margin > 0, found.why_not_sum  # for the zero, and its terms add up
        (tensor([True]), '')
    """

    terms: tuple[str, ...]
    pull: Tensor
    """∂margin/∂term, (samples, terms)."""
    source: Tensor
    """What the term brings of the margin itself, (samples, terms)."""
    head: Tensor
    """The margin of a feature of zeros: what the biases of the head say."""
    margin: Tensor
    why_not_sum: str
    """Why head and sources need not add up to the margin; empty where they do."""

    @property
    def remainder(self) -> Tensor:
        """What head and sources leave of the margin: rounding, where they add up to it."""
        return self.margin - self.head - self.source.sum(dim=1)


def contributions(
    model: EquilibriumModel, images: Tensor, classes: Tensor, rivals: Tensor
) -> Contributions:
    """What pulled the decision for `classes` over `rivals`, one of each a sample.

    Everything is computed in float64, at equilibria that are solved to 1e-10.

    Examples:
        >>> model, images = eq.load("digits-opteq"), eq.data.load_digits().test.images[:1]
        >>> zero, three = torch.tensor([0]), torch.tensor([3])
        >>> found = eq.models.contributions(model, images, zero, three)
        >>> found.terms, found.pull.shape
        (('input', 'bias', 'quadratic'), torch.Size([1, 3]))
    """
    exact = in_float64(model)
    if exact.layer.couples_batch:
        raise NoContributionsError("the samples of a batch are coupled: they decide together")
    with solving(exact, tolerance=TOLERANCE, max_iterations=MOST_ITERATIONS):
        solution = exact.solve(images.double())
    decided = _Decided(exact, classes, rivals)
    form = energy_form(exact.layer.cell, solution.state, solution.context)
    if form is not None:
        return decided.of_terms(form)
    if isinstance(exact.layer.cell, DeepOptEqCell):
        return decided.of_layers(exact.layer.cell, solution)
    raise NoContributionsError(
        f"{type(exact.layer.cell).__name__} has no hidden objective whose terms could be weighed"
    )


@dataclass(frozen=True)
class _Decided:
    """The decisions that are asked about."""

    model: EquilibriumModel
    classes: Tensor
    rivals: Tensor

    def margin(self, cell: Cell, state: State, context: Context) -> Tensor:
        return self._between(cell.output(state, context))

    def _between(self, feature: Tensor) -> Tensor:
        logits: Tensor = self.model.head(feature)
        of, over = (logits.gather(1, one[:, None])[:, 0] for one in (self.classes, self.rivals))
        return of - over

    def of_terms(self, form: EnergyForm) -> Contributions:
        cell, context = form.cell, form.context
        force = tuple(
            torch.zeros_like(y, requires_grad=True)
            for y in state_tensors(map_state(torch.detach, form.image))
        )
        # The state is there already: what is left is the adjoint.
        layer = EquilibriumLayer(
            cell=_Forced(form),
            solver=Picard(tolerance=math.sqrt(TOLERANCE)),
            gradient=Implicit(tolerance=TOLERANCE, max_iterations=MOST_ITERATIONS),
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
            past = self._past(cell, state, context)
            if bool(past.any()):
                names.append(PAST)
                pulls.append(past)
                sources.append(past)
        return Contributions(
            terms=tuple(names),
            pull=torch.stack(pulls, dim=1),
            source=torch.stack(sources, dim=1),
            head=self._head(cell, state, context),
            margin=margin.detach(),
            why_not_sum=self._why_not_sum(cell, [cell.activation]),
        )

    def of_layers(self, cell: DeepOptEqCell, solution: Solution) -> Contributions:
        """Of a Deep OptEq: what enters each layer; it is homogeneous in all of that together."""
        leaves = [part["c"].detach().requires_grad_() for part in solution.context.parts.values()]
        pairs = zip(solution.context.parts.items(), leaves, strict=True)
        context = Context(parts={name: part.with_sample(c=c) for (name, part), c in pairs})
        layer = EquilibriumLayer(
            cell=_Given(cell, context),
            solver=Picard(tolerance=math.sqrt(TOLERANCE)),
            gradient=Implicit(tolerance=TOLERANCE, max_iterations=MOST_ITERATIONS),
        )
        with torch.enable_grad(), solving(layer, record="equilibria") as record:
            layer(leaves[0], solution.state)
            state = record.equilibria[0].state
            margin = self.margin(cell, state, context)
            gradients = torch.autograd.grad(margin.sum(), leaves)
        names, pulls = [], []
        triples = zip(cell.units(), leaves, gradients, strict=True)
        for place, (unit, c, gradient) in enumerate(triples, 1):
            for name, part in _parts_of(unit.input, c.detach()):
                names.append(f"{name} of layer {place}")
                pulls.append(sum_per_sample(gradient * part))
        pull = torch.stack(pulls, dim=1)
        return Contributions(
            terms=tuple(names),
            pull=pull,
            source=pull,
            head=self._head(cell, state, context),
            margin=margin.detach(),
            why_not_sum=self._why_not_sum(cell, [unit.activation for unit in cell.units()]),
        )

    @torch.no_grad()
    def _head(self, cell: Cell, state: State, context: Context) -> Tensor:
        return self._between(torch.zeros_like(cell.output(state, context)))

    @torch.no_grad()
    def _past(self, cell: Cell, state: State, context: Context) -> Tensor:
        """What a state of zeros says, less the head: −u of a reflection 2z − u, else nothing."""
        feature = cell.output(map_state(torch.zeros_like, state), context)
        return self._between(feature) - self._between(torch.zeros_like(feature))

    def _why_not_sum(self, cell: Cell, activations: list[Activation]) -> str:
        others = [a for a in activations if not isinstance(a, HOMOGENEOUS)]
        if others:
            return f"σ(a) is not σ′(a)·a for {type(others[0]).__name__}, which leaves a remainder"
        if output_form(cell) == "other":
            return f"the feature of {type(cell).__name__} is not affine in the state"
        return why_not_affine(self.model.head)


class _Forced(Cell):
    """y = σ(−∇E(y) + e): an equilibrium, with a force e on every unit."""

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


class _Given(Cell):
    """The map of another cell, at a context that is there already."""

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
    """⟨v, (∂d/∂y)y⟩ of each sample, of the pull ⟨v, d(y)⟩."""
    if not pull.requires_grad:
        return torch.zeros_like(pull)
    tensors = state_tensors(state)
    slopes = torch.autograd.grad(pull.sum(), tensors, retain_graph=True, materialize_grads=True)
    return torch.stack([sum_per_sample(s * y) for s, y in zip(slopes, tensors, strict=True)]).sum(0)


def _difference(one: Tensor, other: Tensor) -> Tensor:
    left = one - other
    return torch.where(left.abs() <= CANCELED * (one.abs() + other.abs()), 0.0, left)


def _named_descents(
    energy: Energy, state: State, context: Context
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """d_t of every term that has no terms itself, as tensors like those of the state."""
    tensors = state_tensors(state)
    if isinstance(energy, Sum):
        for name, term in energy.named_terms():
            yield from _named_descents(term, state, context.parts[name])
    elif isinstance(energy, Scaled):
        for name, descents in _named_descents(energy.term, state, context):
            yield name, tuple(energy.factor * descent for descent in descents)
    elif isinstance(energy, Branches):
        for place, (term, part, y) in enumerate(energy.each(context, energy.states(state))):
            zeros = tuple(torch.zeros_like(tensor) for tensor in tensors)
            for name, (descent,) in _named_descents(term, y, part):
                whole = (*zeros[:place], descent, *zeros[place + 1 :])
                yield f"{name} of branch {place + 1}", whole
    elif isinstance(energy, Input):
        for name, added in _parts_of(energy, context["c"]):
            yield name, (added,)
    elif isinstance(energy, HeritageDiversity) and energy.coupling.diversity:
        whole = state_tensors(energy.descent(state, context))
        alike = copy.copy(energy)
        alike.coupling = copy.copy(energy.coupling)
        alike.coupling.diversity = 0.0
        similar = state_tensors(alike.descent(state, context))
        yield "heritage", similar
        yield "diversity", tuple(a - b for a, b in zip(whole, similar, strict=True))
    else:
        name = "heritage" if isinstance(energy, HeritageDiversity) else energy.name
        yield name.replace("_", " "), state_tensors(energy.descent(state, context))


def _parts_of(term: Input, c: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Ux and b of Ux + b."""
    if term.bias is None:
        yield "input", c
        return
    bias = term.bias.detach().expand_as(c)
    yield "input", c - bias
    yield "bias", bias
