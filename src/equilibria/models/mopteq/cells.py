"""MOptEqs' cells: branches coupled by heritage and diversity, and the PE strategy.

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
    """MOptEqs' cell of branches that are coupled by heritage and diversity (HH&D).

    Its equilibrium z̃ = W̃ᵀσ(W̃h(z̃) + Ũg(x) + b̃) (MOptEqs, Eq. 6) is a stationary point of Eq. 5.
    The states are yᵢ with features zᵢ = Wᵢᵀyᵢ.

    With the perturbation-enhanced strategy, PE, the input of branch i is g(x) − δᵢ₋₁ with δ₀ = 0.
    δᵢ = ε sign(Uᵢᵀyᵢ) is the perturbation that increases the objective of branch i most.

    Args:
        inputs: Term by which g(x) enters each branch: `Input`, or a kernel of GEQ's Table 5.
        coupling: Terms H and D between neighboring branches.
        activation: σ.
        fusion: How features are joined (see `BranchCell`).
        alpha: Weight of the new iterate in a step, in (0, 1].
        pe: When PE is used: "train" (in training mode), "always" or "off".
        epsilon: ε.
        perturb_for: Number of first iterations that update δ. It is constant afterwards, because
            with a new δ at every step the iteration would not converge.

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
            raise ValueError(
                f"pe={pe!r} needs linear inputs −⟨Ux + b, y⟩; set kernel='linear' or pe='off'"
            )
        super().__init__(Branches(inputs) + coupling, activation, fusion=fusion, alpha=alpha)
        self.pe = pe
        self.epsilon = epsilon
        self.perturb_for = perturb_for
        if coupling.coupling.diversity and coupling.coupling.sign == "hard":
            self.remedy = (
                "the signs of the diversity term alternate at its kinks: set sign='smooth' or "
                "'freeze', or use a smaller diversity"
            )

    @property
    def perturbs(self) -> bool:
        """Whether the branches' inputs are perturbed (the strategy PE) in the current mode."""
        return self.pe == "always" or (self.pe == "train" and self.training)

    @property
    def refresh_until(self) -> int:
        """Number of first iterations of a solve in which signs or perturbations still change."""
        return max(self.energy.facts.refresh_until, self.perturb_for if self.perturbs else 0)

    @property
    def heritage_diversity(self) -> HeritageDiversity:
        """The heritage and diversity term of the energy."""
        assert isinstance(self.energy, Sum)
        term = self.energy["heritage_diversity"]
        assert isinstance(term, HeritageDiversity)
        return term

    def inputs(self) -> list[Input]:
        """Return the linear terms by which the features g(x) of the stem enter the branches."""
        assert isinstance(self.energy, Sum)
        branches = self.energy["branches"]
        assert isinstance(branches, Branches)
        return [term for term in branches.branches() if isinstance(term, Input)]

    def features(self, state: State, context: Context) -> Sequence[Tensor]:
        """Return the feature zᵢ = Wᵢᵀyᵢ of each branch i, which the head reads.

        Args:
            state: The states yᵢ, one tensor per branch.
            context: Result of `inject`; it holds the weights Wᵢ.
        """
        return self.heritage_diversity.features(state, context.parts["heritage_diversity"])

    def inject(self, *inputs: Tensor) -> Context:
        return self.with_clean_inputs(super().inject(*inputs))

    def with_clean_inputs(self, context: Context) -> Context:
        """Add to a context what perturbed inputs need (the strategy PE).

        These are a copy of each input c without its perturbation, and the number of refreshes.
        """
        if not self.perturbs:
            return context
        context = context.with_shared({"refreshes": torch.zeros((), device="cpu")})
        parts = context.parts["branches"].parts.values()
        branches = Context(parts=numbered(part.with_sample(clean=part["c"]) for part in parts))
        return context.with_part("branches", branches)

    def simplify(self, context: Context) -> Context:
        """Detach the entries of heritage and diversity, for approximate gradients.

        They are 0.1 % of the gradient and 10 % of its cost.
        """
        coupling = context.parts["heritage_diversity"]
        detached = {name: coupling[name].detach() for name in coupling.sample}
        return context.with_part("heritage_diversity", coupling.with_sample(**detached))

    def refresh(self, state: State, context: Context) -> Context:
        """Recompute the frozen signs and the perturbations of the inputs at the current iterate.

        Args:
            state: Current iterate.
            context: Tensors that the map read besides the state until now.
        """
        return self.with_refreshed(self.features(state, context), lambda _: state, context)

    def with_refreshed(
        self, features: Sequence[Tensor], lift: Callable[[Context], State], context: Context
    ) -> Context:
        """Update the signs of the diversity for `features`, then the perturbations of the inputs.

        The perturbations are those for the state that `lift` returns.
        """
        term = self.heritage_diversity
        count = int(context["refreshes"]) if self.perturbs else 0
        if count < term.facts.refresh_until:
            part = context.parts["heritage_diversity"].with_sample(**term.coupling.signs(features))
            context = context.with_part("heritage_diversity", part)
        if not self.perturbs:
            return context
        if count < self.perturb_for:
            context = self.perturb(lift(context), context)
        return context.with_shared({"refreshes": context["refreshes"] + 1})

    def perturb(self, state: State, context: Context) -> Context:
        """Return the context with perturbed inputs g(x) − δᵢ₋₁, the δᵢ computed at `state`."""
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
    """Return the perturbation δᵢ = ε sign(Uᵢᵀyᵢ) of the stem's features for every branch.

    Among features within ε of g(x) (in the maximum norm), g(x) − δᵢ has the largest objective of
    branch i (MOptEqs, Section 2.2). Uᵢᵀ includes the transpose of the pooling.

    Args:
        cell: The cell.
        state: State y.
        epsilon: ε.

    Returns:
        One tensor per branch, with the shape of g(x).
    """
    pairs = zip(cell.inputs(), state_tensors(state), strict=True)
    return tuple(epsilon * term.U.adjoint(y).sign() for term, y in pairs)


class MOptEqFeatureCell(Cell):
    """MOptEqs' cell with features as states: zᵢ ← Wᵢᵀσ(Wᵢhᵢ(z̃) + Uᵢg(x) + bᵢ) (Eq. 6).

    It has the same equilibrium as the cell `MOptEqCell` with states yᵢ, and a smaller state unless
    the middle widths are small. Its Jacobian WᵀσʹW·∂h is symmetric only in an inner product as
    expensive as the map, so backward solves use GMRES.

    Args:
        cell: The cell in y-space, with linear inputs.
    """

    def __init__(self, cell: MOptEqCell) -> None:
        super().__init__()
        if len(cell.inputs()) < len(cell.heritage_diversity.W):
            raise ValueError("kernels are functions of y, so they need y-space; set space='y'")
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
        context = self.lifted.with_clean_inputs(context.with_part("heritage_diversity", coupling))
        # The solve starts at T(0), which was also used to calibrate the scales.
        return context.with_sample(start=tuple(z.detach() for z in features))

    def initial_state(self, x: Tensor, context: Context) -> State:
        start = context.sample["start"]
        assert isinstance(start, tuple)
        return tuple(torch.zeros_like(z) for z in start)

    def first_image(self, context: Context) -> State:
        return context.sample["start"]

    def lift(self, state: State, context: Context) -> tuple[Tensor, ...]:
        """Return the state yᵢ = σ(Wᵢhᵢ + cᵢ) of each branch, with the injected input cᵢ."""
        return tuple(y for y, _, _ in self._lifted(state, context))

    def _lifted(
        self, state: State, context: Context
    ) -> Iterator[tuple[Tensor, LinearOperator, Weights]]:
        """Yield yᵢ, Wᵢ and its weights per branch, so that branches can reuse memory."""
        branches, coupling = context.parts["branches"], context.parts["heritage_diversity"]
        term = self.lifted.heritage_diversity
        messages = term.coupling.messages(state_tensors(state), coupling.sample)
        triples = zip(term.operators(), messages, branches.parts.values(), strict=True)
        for i, (W, h, part) in enumerate(triples):
            weights, c = coupling.weights(f"W{i}"), part["c"]
            image: Tensor = W(h, weights)
            # The output of a convolution is new memory that can be overwritten.
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
        return self.lifted.with_refreshed(state_tensors(state), lift, context)

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
    """Hidden objective of MOptEqs (Eq. 5) for a cell whose states are the features zᵢ.

    Eq. 5 is a function of the inner activations yᵢ of the branches, with zᵢ = Wᵢᵀyᵢ. Value and
    gradient are those at the yᵢ = σ(Wᵢhᵢ + cᵢ) that one step computes from the features, where hᵢ
    combines the features of the branches and cᵢ is the injected input.
    """

    def __init__(self, cell: MOptEqFeatureCell, context: Context) -> None:
        super().__init__(cell, context)
        self.lifted = cell.lifted.objective(context)

    def value(self, state: State) -> Tensor:
        return self.lifted.value(self.cell.lift(state, self.context))

    def gradient(self, state: State) -> State:
        return self.lifted.gradient(self.cell.lift(state, self.context))


def features_are_large(channels: int, widths: Sequence[int], scales: Sequence[int]) -> bool:
    """Whether the features zᵢ are so much larger than the states yᵢ that iterating in y is cheaper.

    Args:
        channels: Channels of each zᵢ.
        widths: Channels of yᵢ, one number per branch.
        scales: Pooling, one number per branch.
    """
    z = sum(channels / scale**2 for scale in scales)
    y = sum(width / scale**2 for width, scale in zip(widths, scales, strict=True))
    return z > 1.25 * y
