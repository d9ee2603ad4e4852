"""Facts that a cell and its hidden objective state about themselves.

This is the only file of the room that calls the bounds of cells and energies, and the only one that
knows families of cells. `cell_facts` chooses by the class of the cell; a cell about which more can
be proven registers its own facts:

    @cell_facts.register
    def _(cell: MyCell, at: CellPoint) -> MyCellFacts: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch

import torch
from torch import Tensor

from equilibria.activations import IdentityActivation, ReLU
from equilibria.context import Context, State
from equilibria.context.state import Layout, Packing
from equilibria.energies import Energy, HeritageDiversity
from equilibria.energies.bounds import UnitBound
from equilibria.energies.capabilities import rounding as rounding_of
from equilibria.energies.rounding import Rounding
from equilibria.equilibrium import Cell, EnergyCell, capabilities
from equilibria.equilibrium.capabilities import EnergyForm
from equilibria.models.mopteq.cells import MOptEqCell, MOptEqFeatureCell
from equilibria.models.opteq.cells import DeepOptEqCell
from equilibria.operators.rounding import NORM_SLACK, unit_roundoff, upper_norm

UNIT = unit_roundoff(torch.float64)
"""Unit roundoff of float64, in which every certificate is computed."""


class SharedBounds:
    """Bounds of a cell or an energy for states of one layout.

    A number that holds for every input is computed once.
    """

    def __init__(self, owner: Cell | Energy, layout: Layout) -> None:
        self.owner = owner
        self.layout = layout
        self._shared: dict[str, Tensor | None] = {}

    def __call__(self, name: str, context: Context) -> Tensor | None:
        """Return the number `name` of the bounds, from memory if it holds for every input.

        It is None if unknown, one number that holds for every input, or one number per sample.
        """
        if name not in self._shared:
            bound: Tensor | None = getattr(self.owner.bounds(context, self.layout), name)
            if bound is not None and bound.dim():
                return bound
            self._shared[name] = bound
        return self._shared[name]


def per_sample(bound: Tensor | None, like: Tensor) -> Tensor:
    """Expand a bound to one float64 number per sample, rounded up; ∞ if it is unknown."""
    known = like.new_full((len(like),), torch.inf) if bound is None else bound.double()
    return known.expand(len(like)) * (1 + NORM_SLACK)


def largest(bound: Tensor | None) -> float:
    """Largest value of a bound, rounded up; ∞ if it is unknown."""
    return torch.inf if bound is None else float(bound.max()) * (1 + NORM_SLACK)


@dataclass(frozen=True, eq=False)
class CellPoint:
    """A state and a context, for an image of zeros, that show shapes and shared numbers."""

    state: State
    context: Context
    couples_batch: bool = False

    @property
    def layout(self) -> Layout:
        """Shapes of the state."""
        return Packing.of(self.state).layout


def energy_rounding(
    cell: EnergyCell, context: Context, layout: Layout, unit: float
) -> Rounding | None:
    """Bound the rounding error of ∇E, the gradient of a cell's energy; None if it is unknown.

    Args:
        cell: The cell.
        context: Tensors that the energy reads besides the state.
        layout: Shapes of the tensors of the state, without the batch dimension.
        unit: Unit roundoff of the type in which ∇E is computed.
    """
    return rounding_of(cell.energy, cell.energy, context, layout, unit)


@dataclass(frozen=True, eq=False)
class ObjectiveFacts:
    """Facts about the hidden objective, in its own variables."""

    form: EnergyForm
    """The objective at the probe."""
    layout: Layout
    bounds: SharedBounds

    def concavity(self, context: Context) -> Tensor | None:
        """Upper bound h on the eigenvalues of −∇²E, E the layer's energy; None if it is unknown.

        The layer's hidden objective G(y; x) = 1ᵀf(y) + ½‖y‖² + E(y; x) is then (1 − h)-strongly
        convex.
        """
        return self.bounds("concavity", context)

    def curvature(self, context: Context) -> Tensor | None:
        """Lipschitz constant of ∇E in the state."""
        return self.bounds("curvature", context)

    def input_lipschitz(self, context: Context) -> Tensor | None:
        """Lipschitz constant of ∇E in the input of the layer, ‖U‖."""
        return self.bounds("input", context)

    def rounding(self, unit: float) -> Rounding | None:
        """Rounding error of ∇E in a type with this unit roundoff, or None if it is unknown."""
        return energy_rounding(self.form.cell, self.form.context, self.layout, unit)

    def units(self) -> Sequence[UnitBound] | None:
        """Norms of every unit, of a quadratic energy, or None if they are unknown."""
        return self.form.cell.energy.bounds(self.form.context, self.layout).units


@dataclass(frozen=True, eq=False)
class CellFacts:
    """Facts about the map of a cell in float64; the defaults prove nothing more."""

    cell: Cell
    at: CellPoint
    bounds: SharedBounds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", SharedBounds(self.cell, self.at.layout))

    def contraction(self, context: Context) -> Tensor | None:
        """Lipschitz constant q of the map in the state."""
        return self.bounds("contraction", context)

    def input_lipschitz(self, context: Context) -> Tensor | None:
        """Lipschitz constant of the map in the input of the layer."""
        return self.bounds("input", context)

    def rounding(self, used: Cell, unit: float) -> Rounding | None:
        """Rounding error of the step of `used`, which has this unit roundoff."""
        return capabilities.rounding(used, self.cell, self.at.context, self.at.layout, unit)

    def objective(self) -> ObjectiveFacts | None:
        """The hidden objective, if its subgradients are computed without rounding σ."""
        form = self.form(self.at.state, self.at.context)
        if form is None or not isinstance(form.cell.activation, ReLU | IdentityActivation):
            return None
        layout = Packing.of(form.image).layout
        return ObjectiveFacts(form, layout, SharedBounds(form.cell.energy, layout))

    def form(self, state: State, context: Context) -> EnergyForm | None:
        """The hidden objective in its own variables y, with σ(−∇E(y)) at a state; None if unknown.

        Args:
            state: State of the cell.
            context: Tensors that the cell reads besides the state.
        """
        return (
            None if self.at.couples_batch else capabilities.energy_form(self.cell, state, context)
        )

    @property
    def coupling(self) -> HeritageDiversity | None:
        """Coupling between the branches of an MOptEq, or None."""
        return None

    @property
    def has_moving_signs(self) -> bool:
        """Whether signs of the coupling may differ between the state and the equilibrium."""
        return self.coupling is not None and bool(self.coupling.coupling.diversity)

    @property
    def is_plain(self) -> bool:
        """Whether the map is y ↦ σ(−∇E(y)) itself, neither relaxed nor damped."""
        return False

    def gradient_lipschitz(self, objective: ObjectiveFacts) -> float | None:
        """Factor from the residual ‖T(y) − y‖ to a subgradient of G at T(y), or None."""
        return None

    def margin_lipschitz(self, rows: State) -> Tensor | None:
        """λ, Lipschitz constant of ⟨g, T⟩ for all differences g of rows, (rows, rows), or None."""
        return None

    def inclusion(self, image: State, context: Context) -> Tensor | None:
        """Residual of an inclusion that the equilibrium solves, per sample, or None."""
        return None


class EnergyCellFacts(CellFacts):
    """Facts of an `EnergyCell`, whose map is the gradient of its energy and an activation."""

    cell: EnergyCell

    @property
    def is_plain(self) -> bool:
        return self.cell.alpha == self.cell.damping == 1

    def gradient_rounding(self, unit: float) -> Rounding | None:
        """Rounding error of ∇E in a type with this unit roundoff, or None if it is unknown."""
        return energy_rounding(self.cell, self.at.context, self.at.layout, unit)

    def gradient_lipschitz(self, objective: ObjectiveFacts) -> float | None:
        bound = objective.curvature(objective.form.context)
        return None if bound is None else largest(bound)


class MOptEqFacts(EnergyCellFacts):
    """Facts of an MOptEq."""

    cell: MOptEqCell

    @property
    def coupling(self) -> HeritageDiversity:
        return self.cell.heritage_diversity


class MOptEqFeatureFacts(CellFacts):
    """Facts of an MOptEq that is iterated in the features."""

    cell: MOptEqFeatureCell

    @property
    def coupling(self) -> HeritageDiversity:
        return self.cell.lifted.heritage_diversity


class DeepOptEqFacts(CellFacts):
    """Facts of a Deep OptEq."""

    cell: DeepOptEqCell

    @property
    def is_plain(self) -> bool:
        return all(layer.raw_alpha == 1.0 for layer in self.cell.units())

    def gradient_lipschitz(self, objective: ObjectiveFacts) -> float | None:
        return upper_norm(self.cell.units()[0].W, self.at.layout[0])

    def margin_lipschitz(self, rows: State) -> Tensor | None:
        if not isinstance(rows, Tensor):
            return None
        slopes = self.cell.slopes_along(rows, self.at.context, self.at.layout)
        return None if slopes is None else slopes * (1 + NORM_SLACK)

    def inclusion(self, image: State, context: Context) -> Tensor | None:
        return None if self.at.couples_batch else self.cell.objective(context).residual(image)


@singledispatch
def cell_facts(cell: Cell, at: CellPoint) -> CellFacts:
    """Collect what a cell states about itself.

    Args:
        cell: Cell in float64.
        at: Shapes, and a context that shows what depends on parameters only.

    Returns:
        The facts that the class of the cell has registered.
    """
    return CellFacts(cell, at)


cell_facts.register(EnergyCell, EnergyCellFacts)
cell_facts.register(MOptEqCell, MOptEqFacts)
cell_facts.register(MOptEqFeatureCell, MOptEqFeatureFacts)
cell_facts.register(DeepOptEqCell, DeepOptEqFacts)
