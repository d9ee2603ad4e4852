"""MOptEqs iterated in the features z, as Eq. 6 is printed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.context import Context, Layout, Packing, State, map_state, state_tensors
from equilibria.equilibrium import Cell
from equilibria.equilibrium.objective import Objective, distance_per_sample
from equilibria.models.mopteq_cell import MOptEqCell


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
    def refresh_until(self) -> int:  # type: ignore[override]
        return self.lifted.refresh_until

    @property
    def formula(self) -> str:
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
        branches, coupling = context.parts["branches"], context.parts["heritage_diversity"]
        term = self.lifted.heritage_diversity
        messages = term.coupling.messages(state_tensors(state), coupling.sample)
        images = zip(term.lift(messages, coupling), branches.parts.values(), strict=True)
        return tuple(self.lifted.activation(image + part["c"]) for image, part in images)

    def step(self, state: State, context: Context) -> State:
        y = self.lift(state, context)
        image = tuple(
            self.lifted.heritage_diversity.features(y, context.parts["heritage_diversity"])
        )
        alpha = self.lifted.alpha
        if alpha == 1:
            return image
        return map_state(lambda z, mapped: z + alpha * (mapped - z), state, image)

    def refresh(self, state: State, context: Context) -> Context:
        term = self.lifted.heritage_diversity
        if term.refresh_until:
            signs = term.coupling.signs(state_tensors(state))
            coupling = context.parts["heritage_diversity"].with_sample(**signs)
            context = context.with_part("heritage_diversity", coupling)
        if not self.lifted.perturbs:
            return context
        with torch.no_grad():
            y = self.lift(state, context)
        return self.lifted.perturb(y, context)

    def simplify(self, context: Context) -> Context:
        return self.lifted.simplify(context)

    def output(self, state: State, context: Context) -> Tensor:
        return self.lifted.fuse(state_tensors(state))

    def sign_flips(self, state: State, context: Context) -> Tensor:
        """As `MOptEqCell.sign_flips`."""
        return self.lifted.sign_flips(self.lift(state, context), context)

    @property
    def contraction_limit(self) -> float | None:
        return self.lifted.contraction_limit

    def contraction_bound(self, context: Context, layout: Layout) -> Tensor | None:
        operators = self.lifted.heritage_diversity.operators()
        lifted = tuple(W.output_shape(shape) for W, shape in zip(operators, layout, strict=True))
        return self.lifted.contraction_bound(context, lifted)

    def objective(self, context: Context) -> LiftedObjective:
        return LiftedObjective(self, context)


class LiftedObjective(Objective):
    """Eq. 5 at the y that a state of features is lifted to."""

    def __init__(self, cell: MOptEqFeatureCell, context: Context) -> None:
        self.cell = cell
        self.context = context
        self.lifted = cell.lifted.objective(context)

    def value(self, state: State) -> Tensor:
        return self.lifted.value(self.cell.lift(state, self.context))

    def gradient(self, state: State) -> State:
        return self.lifted.gradient(self.cell.lift(state, self.context))

    def residual(self, state: State) -> Tensor:
        return distance_per_sample(state, self.cell.step(state, self.context))


def features_are_large(channels: int, widths: Sequence[int], scales: Sequence[int]) -> bool:
    """Whether z-space is so much larger than y-space that y is cheaper to iterate."""
    z = sum(channels / scale**2 for scale in scales)
    y = sum(width / scale**2 for width, scale in zip(widths, scales, strict=True))
    return z > 1.25 * y
