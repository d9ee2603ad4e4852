"""Preparation of a model with one equilibrium layer.

`PreparedModel.of` computes once everything that depends on parameters only. All batches, the early
exit and the constants for exports share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.certificates.checks import probe_noise
from equilibria.certificates.facts import (
    UNIT,
    CellFacts,
    CellPoint,
    ObjectiveFacts,
    cell_facts,
    largest,
)
from equilibria.certificates.margins import ClassPairs
from equilibria.certificates.radii import Pattern
from equilibria.certificates.resolvent import Resolvent
from equilibria.certificates.states import flat_rows, readout
from equilibria.certificates.stem import LINF, ImagePath, StemBounds, UnboundedError
from equilibria.context import State
from equilibria.energies.kernel_scale import RunningScale
from equilibria.energies.rounding import Rounding
from equilibria.equilibrium import capabilities
from equilibria.equilibrium.layer import as_inputs
from equilibria.models.affine import why_not_affine
from equilibria.models.base import EquilibriumModel, in_float64


@dataclass(frozen=True, eq=False)
class Reading:
    """The logits as an affine function of the variables, with bounds on their differences."""

    rows: State
    """One row per class, in the shape of the variables."""
    offset: Tensor
    pairs: ClassPairs
    margin_lipschitz: Tensor | None = None
    """λ, Lipschitz constant of ⟨g, T⟩ of all pairs of classes, where it is known."""
    resolvent: Resolvent | None = None
    units: list[Tensor] | None = None
    """Norms of every unit, where activation patterns can be used."""
    pairs_linf: ClassPairs | None = None
    """`pairs` for perturbations in L∞, if they prove more than the L2 radius implies."""


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A model with one equilibrium layer and the bounds that depend on its parameters only."""

    model: EquilibriumModel
    exact: EquilibriumModel
    """The model in float64."""
    shape: tuple[int, ...]
    cell: CellFacts
    objective: ObjectiveFacts | None
    path: ImagePath | None
    """The map from the image to the objective's variables."""
    stem: StemBounds | None
    rounding: Rounding | None
    """Rounding of the map."""
    gradient_rounding: Rounding | None
    """Rounding of ∇E."""
    noise: tuple[Tensor, ...]
    reading: Reading | None
    """None if no class is certain."""
    no_class: str
    """Why no class of any sample is certain; empty if some may be."""
    no_radius: str
    """Why the stem allows no radius for any sample; empty if it does."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: EquilibriumModel, image_shape: tuple[int, ...]) -> PreparedModel:
        """Prepare a model: compute everything that depends on parameters only."""
        shape, exact = tuple(image_shape), in_float64(model)
        stem, no_radius = _stem_bounds(exact, shape)
        inputs = as_inputs(exact.injected(next(exact.parameters()).new_zeros(1, *shape)))
        cell = exact.layer.cell
        context = cell.inject(*inputs)
        state = cell.initial_state(*inputs, context)
        facts = cell_facts(cell, CellPoint(state, context, exact.layer.couples_batch))
        objective = facts.objective()
        rounding = gradient_rounding = facts.rounding(cell, UNIT)
        path: ImagePath | None = None
        noise: tuple[Tensor, ...] = ()
        if objective is not None:
            gradient_rounding = objective.rounding(UNIT)
            form = objective.form
            feature = tuple(inputs[0].shape[1:])
            path = ImagePath(exact, form.cell.energy, form.image, shape, feature, stem)
            noise = probe_noise(objective.layout, inputs[0].device)
        no_class = _why_no_class(model, exact, facts, gradient_rounding)
        reading = None if no_class else _reading(exact, facts, objective, path)
        return cls(
            model=model,
            exact=exact,
            shape=shape,
            cell=facts,
            objective=objective,
            path=path,
            stem=stem,
            rounding=rounding,
            gradient_rounding=gradient_rounding,
            noise=noise,
            reading=reading,
            no_class=no_class,
            no_radius=no_radius,
        )

    def stem_error(self, images: Tensor) -> Tensor:
        """Return the rounding error of the stem in float64, per image; 0 if it has no bound."""
        if self.stem is None:
            return images.new_zeros(len(images))
        return self.stem.run(images).error


def _stem_bounds(exact: EquilibriumModel, shape: tuple[int, ...]) -> tuple[StemBounds | None, str]:
    """Return the bounds on the stem, or None and the reason."""
    try:
        normalize = getattr(exact, "normalize", None)
        return StemBounds.of(exact.stem, exact.stem, normalize, shape, UNIT), ""
    except UnboundedError as error:
        return None, str(error)


def _why_no_class(
    model: EquilibriumModel, exact: EquilibriumModel, cell: CellFacts, rounding: Rounding | None
) -> str:
    """Return why the model allows no certified class for any sample; empty if it does."""
    if exact.layer.couples_batch:
        return "the samples of a batch are coupled: the result of one depends on the others"
    for part in model.modules():
        if isinstance(part, RunningScale) and not float(part.patch_energy) > 0:
            return "the scale γ of its kernel has no statistics yet: train the model first"
    if cell.has_moving_signs:
        return (
            "the signs of its diversity term (λ > 0) may flip between the state and the "
            "equilibrium: error bars are relative to the signs of the state"
        )
    if capabilities.refresh_until(cell.cell):
        return "its map depends on the first iterations of the solve"
    if why := why_not_affine(exact.head):
        return why
    if capabilities.output_form(cell.cell) != "linear":
        return f"the output of {type(cell.cell).__name__} is not linear in the state"
    if rounding is None:
        return f"no bound on the rounding error of {type(cell.cell).__name__} is known"
    return ""


def _reading(
    exact: EquilibriumModel,
    cell: CellFacts,
    objective: ObjectiveFacts | None,
    path: ImagePath | None,
) -> Reading:
    """Express the logits as affine functions, and prepare the norms of their differences."""
    if objective is None or path is None:
        rows, offset = readout(cell.cell, exact.head, cell.at.state, cell.at.context)
        return Reading(rows, offset, ClassPairs(flat_rows(rows)), cell.margin_lipschitz(rows))
    form = objective.form
    rows, offset = readout(form.cell, exact.head, form.image, form.context)
    flat, energy = flat_rows(rows), form.cell.energy
    concavity = largest(objective.concavity(form.context))
    if not energy.facts.is_quadratic or concavity >= 1:
        return Reading(rows, offset, ClassPairs(flat))
    resolvent = Resolvent(energy, form.context, objective.layout, concavity)
    resolved = resolvent.solve(flat)
    bounds = objective.units()
    units = None if bounds is None else Pattern.unit_norms(bounds, objective.layout)
    pulled = None if path.stem is None else path.pull_back(resolved.solution)
    pairs = ClassPairs(flat, resolved, pulled, path.length)
    pairs_linf = None
    if path.is_whole:
        pairs_linf = ClassPairs(flat, resolved, pulled, path.in_norm(LINF).length)
    return Reading(rows, offset, pairs, None, resolvent, units, pairs_linf)
