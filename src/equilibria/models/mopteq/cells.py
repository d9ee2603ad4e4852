"""MOptEqs' equilibrium: branches joined by heritage and diversity, and the PE strategy.

Li et al., "Optimization Inspired Multi-Branch Equilibrium Models": the architecture (Section 2.1)
and the Perturbation Enhanced strategy, PE (Section 2.2, Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from equilibria.activations import Activation
from equilibria.context import Context, State
from equilibria.context.context import numbered
from equilibria.context.state import Layout, Packing, map_state, state_tensors
from equilibria.energies import Branches, Energy, HeritageDiversity, Input
from equilibria.energies.compose import Sum
from equilibria.equilibrium import Cell, StepBounds, capabilities
from equilibria.equilibrium.capabilities import EnergyForm, OutputForm
from equilibria.models.base import MapObjective
from equilibria.models.mopteq.branches import BranchCell, Fusion
from equilibria.operators import LinearOperator
from equilibria.operators.base import Weights
from equilibria.operators.norm_control import KernelOperator
from equilibria.registry import check_at_least_one, check_choice, check_not_negative

Perturb = Literal["train", "always", "off"]


class MOptEqCell(BranchCell):
    """z̃ = W̃ᵀσ(W̃h(z̃) + Ũg(x) + b̃) (Eq. 6), in the variables yᵢ, zᵢ = Wᵢᵀyᵢ.

    `inputs` is how g(x) enters each branch (`Input`, or a kernel of GEQ's Table 5), `coupling` the
    terms H and D between neighbors. An equilibrium is a stationary point of Eq. 5.

    PE: branch i sees g(x) − δᵢ₋₁, where δᵢ = ε sign(Uᵢᵀyᵢ) (δ₀ = 0) is the perturbation that raises
    the objective of branch i most. pe="train": in training only; "always"; "off". A δ that changed
    at every step would make the iteration chatter: it is renewed in the first `perturb_for`
    iterations and then kept, so that the solve converges.

    Examples:
        >>> from equilibria.models.mopteq.models import mopteq
        >>> model = mopteq(channels=4, in_channels=1)
        >>> model.features(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 4, 8, 8])
    """

    def __init__(
        self,
        inputs: Sequence[Energy],
        coupling: HeritageDiversity,
        *,
        activation: str | Activation = "relu",
        fusion: Fusion = "average",
        alpha: float = 1.0,
        pe: Perturb | Literal[False] = "off",
        epsilon: float = 0.1,
        perturb_for: int = 5,
    ) -> None:
        pe = pe or "off"  # YAML reads a bare `off` as False.
        check_choice(get_args(Perturb), pe=pe)
        check_not_negative(epsilon=epsilon)
        check_at_least_one(perturb_for=perturb_for)
        if pe != "off" and not all(isinstance(term, Input) for term in inputs):
            raise ValueError("PE perturbs −⟨Ux + b, y⟩: use kernel='linear', or pe='off'")
        super().__init__(Branches(inputs) + coupling, activation, fusion=fusion, alpha=alpha)
        self.pe = pe
        self.epsilon = epsilon
        self.perturb_for = perturb_for
        if coupling.coupling.diversity and coupling.coupling.sign == "hard":
            self.remedy = (
                "the signs of the diversity term chatter at its kinks: use sign='smooth' or "
                "'freeze', or a smaller diversity"
            )

    @property
    def perturbs(self) -> bool:
        """Whether solves perturb the state in the current mode."""
        return self.pe == "always" or (self.pe == "train" and self.training)

    @property
    def refresh_until(self) -> int:
        """Number of iterations during which the context is updated."""
        return max(self.energy.facts.refresh_until, self.perturb_for if self.perturbs else 0)

    @property
    def heritage_diversity(self) -> HeritageDiversity:
        """The heritage and diversity term of the energy."""
        assert isinstance(self.energy, Sum)
        term = self.energy["heritage_diversity"]
        assert isinstance(term, HeritageDiversity)
        return term

    def inputs(self) -> list[Input]:
        """The terms by which g(x) enters each branch (those for which PE is defined)."""
        assert isinstance(self.energy, Sum)
        branches = self.energy["branches"]
        assert isinstance(branches, Branches)
        return [term for term in branches.branches() if isinstance(term, Input)]

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """zᵢ = Wᵢᵀyᵢ."""
        return self.heritage_diversity.features(state, context.parts["heritage_diversity"])

    def inject(self, *inputs: Tensor) -> Context:
        return self.keep_clean(super().inject(*inputs))

    def keep_clean(self, context: Context) -> Context:
        """For PE: what δ is subtracted from, beside `c`, which is what the branch sees.

        With it how often signs and perturbations have been renewed: each has its own time.
        """
        if not self.perturbs:
            return context
        context = context.with_shared({"renewals": torch.zeros((), device="cpu")})
        parts = context.parts["branches"].parts.values()
        kept = Context(parts=numbered(part.with_sample(clean=part["c"]) for part in parts))
        return context.with_part("branches", kept)

    def simplify(self, context: Context) -> Context:
        """Without the gradient of t, which is a per mille of all and a tenth of the cost."""
        coupling = context.parts["heritage_diversity"]
        kept = {name: coupling[name].detach() for name in coupling.sample}
        return context.with_part("heritage_diversity", coupling.with_sample(**kept))

    def refresh(self, state: State, context: Context) -> Context:
        """Signs and perturbations at a state."""
        return self.renewed(self.features(state, context), lambda _: state, context)

    def renewed(
        self, features: Sequence[Tensor], lift: Callable[[Context], State], context: Context
    ) -> Context:
        """`context` with the signs of these features, and δ of the state that `lift` then gives."""
        term = self.heritage_diversity
        count = int(context["renewals"]) if self.perturbs else 0
        if count < term.facts.refresh_until:
            kept = context.parts["heritage_diversity"].with_sample(**term.coupling.signs(features))
            context = context.with_part("heritage_diversity", kept)
        if not self.perturbs:
            return context
        if count < self.perturb_for:
            context = self.perturb(lift(context), context)
        return context.with_shared({"renewals": context["renewals"] + 1})

    def perturb(self, state: State, context: Context) -> Context:
        """The context in which branch i sees g(x) − δᵢ₋₁, δ of the state."""
        deltas = reconstructed_perturbations(self, state, self.epsilon)
        first, *rest = context.parts["branches"].parts.values()
        perturbed = [
            part.with_sample(c=part["clean"] - term.U(delta))
            for term, part, delta in zip(self.inputs()[1:], rest, deltas, strict=False)
        ]
        return context.with_part("branches", Context(parts=numbered([first, *perturbed])))


@torch.no_grad()
def reconstructed_perturbations(
    cell: MOptEqCell, state: State, epsilon: float
) -> tuple[Tensor, ...]:
    """δᵢ = ε sign(Uᵢᵀyᵢ) of every branch, in the space of g(x).

    g(x) − δᵢ is the feature of this distance at which the objective of branch i is largest
    (Section 2.2). Uᵢᵀ includes the transpose of the branch's pooling.
    """
    pairs = zip(cell.inputs(), state_tensors(state), strict=True)
    return tuple(epsilon * term.U.adjoint(y).sign() for term, y in pairs)


class MOptEqFeatureCell(Cell):
    """The same equilibrium, iterated in the features: zᵢ ← Wᵢᵀσ(Wᵢhᵢ(z̃) + Uᵢg(x) + bᵢ) (Eq. 6).

    Cheaper than `cell`, the form in y, where the middle widths are not small: the state is smaller,
    and it is the feature. Its Jacobian WᵀσʹW·∂h is symmetric only in an inner product that is as
    costly as the map, so backward solves use GMRES.
    """

    def __init__(self, cell: MOptEqCell) -> None:
        super().__init__()
        if len(cell.inputs()) < len(cell.heritage_diversity.W):
            raise ValueError("kernels act on y: iterate them in y-space (space='y')")
        self.lifted = cell
        self.remedy = cell.remedy

    @property
    def refresh_until(self) -> int:
        return self.lifted.refresh_until

    @property
    def formula(self) -> str | None:
        return self.lifted.formula

    def inject(self, x: Tensor) -> Context:
        energy, term = self.lifted.energy, self.lifted.heritage_diversity
        context = energy.inject(x)
        zero = energy.initial_state(context)
        assert zero is not None
        context = energy.complete(context, Packing.of(zero).layout)
        coupling = context.parts["heritage_diversity"]
        parts = context.parts["branches"].parts.values()
        first = [self.lifted.activation(part["c"]) for part in parts]
        features = term.features(tuple(first), coupling)
        coupling = term.calibrate_features(features, coupling)
        context = self.lifted.keep_clean(context.with_part("heritage_diversity", coupling))
        # T(0), which the scales were taken at, is where the solve starts.
        return context.with_sample(start=tuple(z.detach() for z in features))

    def initial_state(self, x: Tensor, context: Context) -> State:
        start = context.sample["start"]
        assert isinstance(start, tuple)
        return tuple(torch.zeros_like(z) for z in start)

    def first_image(self, context: Context) -> State:
        return context.sample["start"]

    def lift(self, state: State, context: Context) -> tuple[Tensor, ...]:
        """yᵢ = σ(Wᵢhᵢ + cᵢ)."""
        return tuple(y for y, _, _ in self._lifted(state, context))

    def _lifted(
        self, state: State, context: Context
    ) -> Iterator[tuple[Tensor, LinearOperator, Weights]]:
        """yᵢ, Wᵢ and its weights, branch by branch.

        One after the other: a branch and its derivative then use the memory of the one before.
        """
        branches, coupling = context.parts["branches"], context.parts["heritage_diversity"]
        term = self.lifted.heritage_diversity
        messages = term.coupling.messages(state_tensors(state), coupling.sample)
        triples = zip(term.operators(), messages, branches.parts.values(), strict=True)
        for i, (W, h, part) in enumerate(triples):
            weights, c = coupling.weights(f"W{i}"), part["c"]
            image: Tensor = W(h, weights)
            # A kernel's image is new memory, larger than the state, and of no other use.
            if isinstance(W, KernelOperator) and image.dtype == c.dtype:
                yield self.lifted.activation.overwrite(image.add_(c)), W, weights
            else:
                yield self.lifted.activation(image + c), W, weights

    def step(self, state: State, context: Context) -> State:
        image = tuple(W.adjoint(y, weights) for y, W, weights in self._lifted(state, context))
        alpha = self.lifted.alpha
        if alpha == 1:
            return image
        return map_state(lambda z, mapped: z + alpha * (mapped - z), state, image)

    def refresh(self, state: State, context: Context) -> Context:
        lift = torch.no_grad()(partial(self.lift, state))
        return self.lifted.renewed(state_tensors(state), lift, context)

    def simplify(self, context: Context) -> Context:
        return self.lifted.simplify(context)

    @property
    def output_form(self) -> OutputForm:
        return capabilities.output_form(self.lifted)

    def output(self, state: State, context: Context) -> Tensor:
        return self.lifted.fuse(state_tensors(state))

    @property
    def limits(self) -> StepBounds[float]:
        return StepBounds(lambda: self.lifted.limits.contraction)

    def bounds(self, context: Context, layout: Layout) -> StepBounds[Tensor]:
        operators = self.lifted.heritage_diversity.operators()
        lifted = tuple(W.output_shape(shape) for W, shape in zip(operators, layout, strict=True))
        return StepBounds(lambda: self.lifted.bounds(context, lifted).contraction)

    def energy_form(self, state: State, context: Context) -> EnergyForm:
        return EnergyForm(self.lifted, context, self.lift(state, context))

    def objective(self, context: Context) -> LiftedObjective:
        return LiftedObjective(self, context)


class LiftedObjective(MapObjective[MOptEqFeatureCell]):
    """Eq. 5 at the y that a state of features is lifted to."""

    def __init__(self, cell: MOptEqFeatureCell, context: Context) -> None:
        super().__init__(cell, context)
        self.lifted = cell.lifted.objective(context)

    def value(self, state: State) -> Tensor:
        return self.lifted.value(self.cell.lift(state, self.context))

    def gradient(self, state: State) -> State:
        return self.lifted.gradient(self.cell.lift(state, self.context))


def features_are_large(channels: int, widths: Sequence[int], scales: Sequence[int]) -> bool:
    """Whether z-space is so much larger than y-space that y is cheaper to iterate."""
    z = sum(channels / scale**2 for scale in scales)
    y = sum(width / scale**2 for width, scale in zip(widths, scales, strict=True))
    return z > 1.25 * y
